"""MaxSim: sets of tokens of different size, against all products of tokens on one process."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.engine import exchange, tiling
from contrastive_zoo.ranks import devices
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EXACT, Largest, close, distance, numbers, refused
from tests.losses.zoo_pairs import dense_max_sim, dense_pairwise
from tests.simulated import device, on_cpu, put_by, value_and_gradients

NAMES = ("queries", "documents", "negatives")
MASKS = ("query_mask", "document_mask", "negative_mask")
WIDTH = 4
ORDER = [*NAMES[:2], *MASKS[:2], NAMES[2], MASKS[2]]

LOSSES: dict[str, tuple[Callable[..., nn.Module], Callable[..., Tensor], dict[str, Any]]] = {
    "MaxSim": (cz.MaxSim, dense_max_sim, {}),
    "MaxSim, mean": (cz.MaxSim, dense_max_sim, {"token_reduction": "mean"}),
    "MaxSimPairwise": (cz.MaxSimPairwise, dense_pairwise, {}),
}


@dataclass(frozen=True)
class Shard:
    pairs: int
    negatives: int = 0
    lengths: tuple[int, int, int] = (3, 5, 2)


def rows_of(shard: Shard, seed: int) -> dict[str, Tensor]:
    """Return the arguments of a rank. A mask leaves each set at least one token; tokens that are not valid are large."""
    counts, found = (shard.pairs, shard.pairs, shard.negatives), {}
    for index, (name, of, count, length) in enumerate(zip(NAMES, MASKS, counts, shard.lengths, strict=True)):
        mask = numbers(count, length, seed=seed + 10 + index) > -0.3
        if count:
            mask[torch.arange(count), torch.arange(count) % length] = True
        found[name] = numbers(count, length, WIDTH, seed=seed + index).masked_fill(~mask[..., None], 100.0)
        found[of] = mask
    return found


def whole(by_rank: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    found = {}
    for name in (*NAMES, *MASKS):
        longest = max(x[name].shape[1] for x in by_rank)
        found[name] = torch.cat([resized(x[name], longest) for x in by_rank])
    return found


def resized(x: Tensor, length: int) -> Tensor:
    return F.pad(x, [0, 0] * (x.ndim - 2) + [0, length - x.shape[1]])


def learning(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.requires_grad_() if x.is_floating_point() else x for name, x in rows.items()}


def test_the_first_of_equal_tokens_gets_the_gradient() -> None:
    queries = torch.eye(2)[:, None]
    documents = torch.eye(2)[:, None].repeat(1, 3, 1).requires_grad_()
    cz.MaxSim(normalize=False)(queries, documents, None, torch.tensor([[0, 1, 1], [1, 1, 1]])).backward()
    assert documents.grad is not None
    assert documents.grad.abs().amax(2).gt(0).tolist() == [[False, True, False], [True, False, False]]


@pytest.mark.parametrize("cached", [False, True], ids=["recomputed", "cached"])
def test_similarities_of_all_tokens_are_never_held(cached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "TILE_BYTES", 2**14)
    queries, documents = (numbers(24, 16, WIDTH, seed=seed, dtype=torch.float32).requires_grad_() for seed in (1, 2))
    with cz.engine.memory_budget(2**20 if cached else 0), Largest() as largest:
        cz.MaxSim()(queries, documents).backward()
    selected = 24 * 16 * 24
    assert largest.elements <= selected < (24 * 16) ** 2 / 4


def test_tokens_of_16_bits_are_sent_as_they_came() -> None:
    sent = []
    for dtype in (torch.float32, torch.bfloat16):
        tokens = numbers(2, 3, WIDTH, seed=1).to(dtype)
        with patch.object(exchange, "start_gather", wraps=exchange.start_gather) as start_gather:
            cz.MaxSim()(tokens, tokens)
        sent.append(start_gather.call_args.args[0].dtype)
    assert sent == [torch.float32, torch.bfloat16]


def largest_error(name: str, steps: Sequence[Sequence[Shard]], option: Any, budget: int, mutant: str = "") -> float:
    make, dense, settings = LOSSES[name]
    rank, world, errors = dist.get_rank(), dist.get_world_size(), []
    loss = cz.DistributedLoss(make(temperature=cz.LearnableTemperature(0.7), **settings).double(), ring=option)
    alone = cz.LearnableTemperature(0.7).double()
    for index, shards in enumerate(steps):
        by_rank = [rows_of(shard, seed=100 * index + 20 * r) for r, shard in enumerate(shards)]
        every = learning(whole(by_rank))
        mine = learning(by_rank[rank])
        given = dict(mine)
        if mutant == "padding counts":
            given |= {of: torch.ones_like(mine[of]) for of in MASKS}
        with cz.engine.memory_budget(budget):
            value = (loss.loss if mutant == "local negatives" else loss)(**given)
        expected = dense(**every, temperature=alone(), **settings)
        errors.append(distance(value.detach(), expected.detach()))
        loss.zero_grad()
        alone.zero_grad()
        value.backward()
        expected.backward()
        for name_of in NAMES:
            counts = [len(x[name_of]) for x in by_rank]
            length = mine[name_of].shape[1]
            wanted, found = every[name_of].grad, mine[name_of].grad
            assert wanted is not None
            assert found is not None
            errors.append(distance(found, world * wanted.split(counts)[rank][:, :length]))
        (ours,), (theirs,) = loss.parameters(), alone.parameters()
        assert ours.grad is not None
        of_one = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad  # one pair is compared with nothing
        errors.append(distance(ours.grad, of_one))
    return max(errors)


shard_of_a_rank = st.builds(
    Shard, st.integers(0, 4), st.integers(0, 2), st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 3))
)


@st.composite
def trainings(draw: st.DrawFn) -> list[tuple[Shard, ...]]:
    """Draw steps of two or three ranks, in each of which somebody has something."""
    world = draw(st.sampled_from([2, 3]))
    steps = draw(st.lists(st.tuples(*[shard_of_a_rank] * world), min_size=1, max_size=3))
    return [step for step in steps if any(shard.pairs for shard in step)] or [(Shard(1),) * world]


@pytest.mark.parametrize("name", LOSSES)
@given(steps=trainings(), option=st.sampled_from([False, True]), budget=st.sampled_from([0, 2**20]))
def test_ranks_of_any_number_of_tokens_are_one_process(name: str, steps, option, budget, worlds: Worlds) -> None:
    assert max(worlds.run(len(steps[0]), largest_error, name, steps, option, budget)) <= EXACT


@pytest.mark.parametrize("mutant", ["padding counts", "local negatives"])
def test_a_mutant_is_caught(mutant: str, worlds: Worlds) -> None:
    steps = [(Shard(3), Shard(2, 0, (4, 3, 1)))]
    assert max(worlds.run(2, quiet_error, steps, mutant)) > 1e-3


def quiet_error(steps: Sequence[Sequence[Shard]], mutant: str) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it sees its own tokens only
        return largest_error("MaxSim", steps, False, 0, mutant)


def test_bad_tokens_of_one_rank_are_named_on_all(worlds: Worlds) -> None:
    def bad(spoil: Callable[[Tensor], list[Tensor]]) -> None:
        tokens = torch.eye(3)[:, None].repeat(1, 2, 1)
        cz.DistributedLoss(cz.MaxSim(), check_distinct=False)(*(spoil(tokens) if dist.get_rank() else [tokens] * 2))

    words = "ranks disagree on the width of tokens of queries: rank 0 brought d=3, rank 1 brought d=2"
    refused(worlds, 2, lambda: bad(lambda x: [x[..., :2]] * 2), words)
    refused(worlds, 2, lambda: bad(lambda x: [x, x, None, x[..., 0].long()]), "rank 1: … got none in row 1")


def step(make: Callable[[], Any], rows: dict[str, Tensor]) -> tuple[list[Any], list[str]]:
    with device() as mode, cz.engine.memory_budget(0), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiling, "TILE_BYTES", 400)  # several blocks of documents
        put = put_by(mode)
        loss = cz.DistributedLoss(make(), check_finite=False, check_equal=False)
        moved = [put(rows[name]) for name in ORDER if name in rows]
        for _ in range(3):
            mode.reads.clear()
            mode.uploads.clear()
            found = value_and_gradients(loss, moved)
        reads = [*mode.reads, *mode.uploads]
        return on_cpu(found), reads


def whole_step(make: Callable[[], Any], rows: dict[str, Tensor]) -> list[Any]:
    return value_and_gradients(make(), [rows[name] for name in ORDER if name in rows])


@pytest.mark.parametrize("make", [cz.MaxSim, lambda: composition(), lambda: cz.Matryoshka(cz.MaxSim(), (2, 4))])
def test_lengths_are_read_once(make: Callable[[], Any]) -> None:
    rows = rows_of(Shard(7, 4), seed=1)
    found, reads = step(make, rows)
    assert len(reads) == 1
    torch.testing.assert_close(found, whole_step(make, rows), rtol=1e-10, atol=1e-10)


def composition() -> Any:
    return cz.WeightedSum([cz.MaxSim(), cz.MaxSimPairwise()])


SHARDS = (Shard(3, 2), Shard(5, 0, (2, 7, 1)))


def test_a_ring_of_ranks_that_read_their_own_lengths(worlds: Worlds) -> None:
    """With what is computed on accelerators: the simulated device has no ring."""

    def job() -> float:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(devices, "on_cpu", lambda x: False)
            return largest_error("MaxSim", [SHARDS, (Shard(0), Shard(2, 1))], True, 0)

    assert max(worlds.run(2, job)) <= EXACT


def dense_loss(**rows: Tensor) -> Tensor:
    with cz.engine.plain_formulas():
        return cz.MaxSim()(**rows)


@pytest.mark.parametrize("frozen", NAMES)
def test_frozen_tokens_need_no_gradient(frozen: str) -> None:
    rows = learning(rows_of(Shard(4, 2), seed=3))
    rows[frozen] = rows[frozen].detach()
    trained = [rows[name] for name in NAMES if name != frozen]
    found, expected = (torch.autograd.grad(loss(**rows), trained) for loss in (cz.MaxSim(), dense_loss))
    for x, y in zip(found, expected, strict=True):
        close(x, y)
