"""DistributedLoss around losses from elsewhere: what they may take and return, and what is noticed."""

import functools
import gc
import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

import contrastive_zoo as cz
from contrastive_zoo.data.miner import DistributedMiner
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.worlds import Worlds
from contrastive_zoo.wrapper.loss_call import signature
from tests.digits import add_up
from tests.helpers import close, drawn, error_message, local_shard, numbers, rank, refused
from tests.zoo import BatchHard

N, D = 7, 3
SPLITS = [(3, 4), (7, 0), (1, 4, 2), (0, 5, 2)]
LABELS = torch.tensor([0, 1, 0, 2, 1, 2, 0])


def z(n: int = 4, of_rank: int | None = None) -> Tensor:
    return numbers(n, D, seed=7 + (rank() if of_rank is None else of_rank)).requires_grad_()


def y(n: int = 4) -> Tensor:
    return torch.arange(n) % 2


def third_party(embeddings: Tensor, labels: Tensor, indices_tuple: Any = None) -> Tensor:
    """Every row's square, more for later rows; or those of the indices."""
    chosen = torch.arange(len(embeddings)) if indices_tuple is None else indices_tuple[0]
    return (embeddings[chosen].square().sum(1) * (1 + chosen) * (1 + labels[chosen])).mean()


class Parts(NamedTuple):
    total: Tensor
    attraction: Tensor
    note: str


RETURNED: list[Callable[[Tensor, Tensor], Any]] = [
    lambda total, attraction: (total, attraction.detach()),
    lambda total, attraction: [total, {"attraction": attraction.item(), "count": 3, "what": "parts", "none": None}],
    lambda total, attraction: {"loss": total, "attraction": attraction},
    lambda total, attraction: Parts(total, attraction, "of the batch"),
]


@pytest.mark.parametrize(("shards", "trainer"), drawn(SPLITS, ["mean", "sum"], one_in=2), ids=str)
def test_whatever_a_loss_returns_is_that_of_one_process(shards: Sequence[int], trainer: str, worlds: Worlds) -> None:
    def parts(returns: Callable[[Tensor, Tensor], Any], rows: Tensor, labels: Tensor) -> Any:
        attraction = (rows @ rows.T)[labels[:, None] == labels].mean()
        return returns(attraction + rows.exp().mean(), attraction)

    def job() -> list[Any]:
        rows, labels = local_shard(x, shards).requires_grad_(), local_shard(LABELS, shards)
        losses = [cz.DistributedLoss(functools.partial(parts, f), grad_reduction=trainer) for f in RETURNED]
        values = [loss(rows, labels) for loss in losses]
        gradients = [torch.autograd.grad(tree_leaves(value)[0], rows)[0] for value in values]
        return [*zip(values, gradients, strict=True)]

    x = numbers(N, D, seed=1).requires_grad_()
    expected = [parts(returns, x, LABELS) for returns in RETURNED]
    found = worlds.run(len(shards), job)
    for nth, value in enumerate(expected):
        (gradient,) = torch.autograd.grad(tree_leaves(value)[0], x, retain_graph=True)
        scale = 1 / len(shards) if trainer == "mean" else 1.0
        close(scale * torch.cat([of_rank[nth][1] for of_rank in found]), gradient)
        for of_rank in found:
            assert type(of_rank[nth][0]) is type(value)
            for part, other in zip(tree_leaves(of_rank[nth][0]), tree_leaves(value), strict=True):
                is_tensor = isinstance(other, Tensor)
                assert close(part, other.detach()) is None if is_tensor else part == pytest.approx(other)


def uneven(of_rank: int) -> tuple[Tensor, Tensor]:
    return z(2 + of_rank, of_rank), 2 * z(2 + of_rank, of_rank)


def twice_on_rank_0(of_rank: int) -> tuple[Tensor, Tensor]:
    """A rank without samples may give one tensor twice where others give two, if it makes them but once."""
    return (z(3, 1), z(3, 1) + 1) if of_rank else (z(0),) * 2


CALLS: dict[str, tuple[Callable[..., Tensor], Callable[[int], tuple[Tensor, Tensor]]]] = {
    "other names": (lambda a, b: (a * b).sum(), uneven),
    "any views": (lambda *views: views[0].sum(), uneven),
    "a function of torch": (torch.dist, uneven),
    "one tensor twice": (lambda a, b: (a @ b.T).exp().mean(), twice_on_rank_0),
    "one tensor twice, of this library": (cz.Clip(), twice_on_rank_0),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_of_several_calls_is_that_of_one_process(name: str, worlds: Worlds) -> None:
    loss, make = CALLS[name]

    def job() -> list[float]:
        wrapped, values = cz.DistributedLoss(loss), []
        for _ in range(4):
            value = wrapped(*make(rank()))
            value.backward()
            values.append(value.item())
        return values

    expected = loss(*map(torch.cat, zip(make(0), make(1), strict=True))).item()
    assert worlds.run(2, job) == [pytest.approx([expected] * 4, abs=1e-12)] * 2


def test_an_argument_that_is_given_twice_stays_one(worlds: Worlds) -> None:
    def self_or_other(rows: Tensor, others: list[Tensor], labels: Tensor, more: Tensor) -> Tensor:
        return rows.sum() + 10 * (rows is others[0]) + 100 * (labels is more)

    def job() -> tuple[Tensor, Tensor]:
        rows, labels = z(2 + rank()), y(2 + rank())
        value = cz.DistributedLoss(self_or_other)(rows, [rows], labels, labels)
        value.backward()
        apart = cz.DistributedLoss(self_or_other)(rows, [rows.clone()], labels, labels.clone())
        return value - apart, rows.grad

    for difference, gradient in worlds.run(2, job):
        assert difference == 110
        assert (gradient == 2).all()


MINED: list[Callable[..., Tensor]] = [
    lambda z, labels, indices_tuple: third_party(z, labels, indices_tuple),
    lambda z, labels, **named: third_party(z, labels, **named),
    lambda *rows, **named: third_party(*rows, **named),
]


def last_of_all(embeddings: Tensor, labels: Tensor, ref_emb: Any = None, ref_labels: Any = None) -> tuple[Tensor, ...]:
    longest = embeddings.norm(dim=1).argsort(descending=True)[: len(embeddings) // 3]
    return longest, longest if ref_emb is None else len(ref_emb) + longest, longest[torch.randperm(len(longest))]


@pytest.mark.parametrize("shards", SPLITS, ids=str)
def test_a_miner_finds_the_same_inside_and_by_itself(shards: Sequence[int], worlds: Worlds) -> None:
    x = numbers(N, D, seed=1)

    def job() -> Any:
        torch.manual_seed(rank())
        rows, labels = local_shard(x, shards).requires_grad_(), local_shard(LABELS, shards)
        indices = DistributedMiner(last_of_all)(rows, labels)
        references = DistributedMiner(last_of_all)(rows, labels, rows, labels)
        outside = cz.DistributedLoss(third_party)(rows, labels, indices)
        inside = torch.stack([cz.DistributedLoss(loss, miner=last_of_all)(rows, labels) for loss in MINED])
        assert not any(x.requires_grad for x in indices)
        return tuple(indices), tuple(references), outside, inside, torch.rand(1)

    torch.manual_seed(0)
    expected = [last_of_all(x, LABELS), last_of_all(x, LABELS, x, LABELS)]
    value = third_party(x, LABELS, expected[0])
    for _ in MINED:
        last_of_all(x, LABELS)
    found = worlds.run(len(shards), job)
    for by_rank in found:
        for indices, wanted in zip(by_rank[:2], expected, strict=True):
            assert [i.tolist() for i in indices] == [i.tolist() for i in wanted]
        close(by_rank[2], value)
        close(by_rank[3], value.expand(len(MINED)))
    assert found[0][4] == torch.rand(1), "rank 0's stream has moved on as one process's would"
    assert found[1][4] != found[0][4]


def test_a_compiled_loss_takes_what_the_loss_takes() -> None:
    assert signature(torch.compile(nn.CosineEmbeddingLoss(), backend="eager")) == signature(nn.CosineEmbeddingLoss())


def draws(*_: Any, **named: Any) -> list[float]:
    """From every stream there is; an odd number of Gaussians, of which generators keep one in hand."""
    return [torch.rand(()).item(), np.random.rand(), np.random.randn(), random.random(), random.gauss()]


def drawn_alone(seed: int, times: int) -> list[list[float]]:
    for seeded in (torch.manual_seed, np.random.seed, random.seed):
        seeded(seed)
    return [draws() for _ in range(times)]


@pytest.mark.parametrize(("where", "world_size"), drawn(["loss", "miner"], [1, 2, 3], one_in=2))
def test_chance_is_rank_0s_everywhere_and_the_other_ranks_keep_their_own(where, world_size, worlds: Worlds) -> None:
    """Also after a loss that has drawn and raised."""

    def job() -> list[list[float]]:
        found, miner = drawn_alone(100 + rank(), 1), draws if where == "miner" else None
        loss_fn = cz.DistributedLoss(
            lambda embeddings, labels, indices_tuple=None: (embeddings.sum(), indices_tuple or draws()), miner=miner
        )
        found += [loss_fn(z(), y())[1] for _ in range(2)]
        with pytest.raises(ZeroDivisionError):
            cz.DistributedLoss(lambda embeddings, labels: draws()[0] / 0)(z(), y())
        return [*found, draws()]

    ((first, *of_calls, _, last),) = worlds.run(1, drawn_alone, 100, 5)
    found = worlds.run(world_size, job)
    assert found[0] == [first, *of_calls, last]
    for number in range(1, world_size):
        ((local_first, local_last),) = worlds.run(1, drawn_alone, 100 + number, 2)
        assert found[number] == [local_first, *of_calls, local_last]


def of_own_chance(generator: Callable[[], float]) -> Callable[..., Any]:
    def chance(embeddings: Tensor, labels: Tensor) -> dict[str, Any]:
        return {"loss": embeddings.mean() + generator(), "seconds": time.perf_counter() + rank()}

    return chance


SAYS = "chance: its last value must be equal … rank 0 found … rank 1 found … generator of its own … check_equal=False"
DISAGREEING: dict[str, Callable[[], Callable[[], float]]] = {
    "a generator": lambda: np.random.default_rng(rank()).random,
    "a millionth": lambda: itertools.repeat(1 + 1e-6 * rank()).__next__,
    "NaN on one rank": lambda: itertools.repeat(torch.nan if rank() else 1.0).__next__,
}


@pytest.mark.parametrize(("name", "world_size"), drawn(DISAGREEING, [2, 3], one_in=2))
def test_a_value_that_differs_between_ranks_is_noticed(name: str, world_size: int, worlds: Worlds) -> None:
    def bad() -> None:
        loss = cz.DistributedLoss(of_own_chance(DISAGREEING[name]()))
        loss(z(), y())
        loss(z(), y())

    refused(worlds, world_size, bad, SAYS)


def test_it_can_be_turned_off_and_equal_values_are_no_alarm(worlds: Worlds) -> None:
    """Equal up to rounding, that of the call's precision."""

    def job() -> None:
        units = 4 * rank()

        def rounded(embeddings: Tensor, labels: Tensor) -> Tensor:
            share = 1 + units * torch.finfo(embeddings.dtype).eps
            return embeddings.double().exp().sum() * share  # as non-deterministic sums are

        off = cz.DistributedLoss(of_own_chance(DISAGREEING["a generator"]()), check_equal=False)
        shared = cz.DistributedLoss(of_own_chance(lambda: torch.rand(()).item() + np.random.rand() + random.random()))
        nan, nearly = cz.DistributedLoss(of_own_chance(lambda: torch.nan)), cz.DistributedLoss(rounded)
        for dtype in (torch.float64, torch.float32, torch.float64):
            for loss in (off, shared, nan, nearly):
                loss(z().to(dtype), y())

    worlds.run(3, job)


def test_other_terms_of_a_backward_pass_may_use_the_parameters_of_a_loss(worlds: Worlds) -> None:
    def job() -> None:
        loss = cz.DistributedLoss(BatchHard().double())
        with splitting(always=True):
            for _ in range(3):
                (loss(z(), y()) + (1 + rank()) * loss.loss.margin).backward()

    worlds.run(2, job)


def test_an_alarm_is_raised_once_at_the_next_call(worlds: Worlds) -> None:
    def job() -> list[int]:
        wrong = {3, 9}
        values = (float(here * (call in wrong)) for here in [rank()] for call in range(10**6))
        loss = cz.DistributedLoss(of_own_chance(values.__next__))
        heard, done = [], 0
        while done < 12:
            if error_message(lambda: loss(z(), y())) is None:
                done += 1
            else:
                heard.append(done)
        return heard

    assert worlds.run(2, job) == [[4, 10]] * 2


@pytest.mark.parametrize(
    "loss", [cz.NTXent(), BatchHard(), lambda a, b: (a * b).sum()], ids=["own", "a user's", "other"]
)
def test_a_step_leaves_no_reference_cycle(loss: Any, worlds: Worlds) -> None:
    """Embeddings in a cycle would stay in memory until Python's garbage collector runs."""

    def step() -> int:
        with splitting(always=isinstance(loss, BatchHard)):
            return tensors_in_cycles()

    def tensors_in_cycles() -> int:
        loss_fn = cz.DistributedLoss(loss, check_distinct=False)
        rows = torch.arange(6.0).view(3, 2).requires_grad_()
        loss_fn(rows, rows + 1).backward()
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                loss_fn(rows, rows + 1).backward()
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            return sum(isinstance(x, torch.Tensor) for x in gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()

    assert worlds.run(2, step) == [0, 0]


def test_a_loss_in_ddp_whose_hook_sums_gets_the_sum_of_its_gradients(worlds: Worlds) -> None:
    """With grad_reduction="sum" each rank has a share: without DDP's forward pass no hook would add them up."""

    def temperature_gradient(rows: Tensor, labels: Tensor) -> Tensor:
        loss: Any = cz.SupCon(temperature=cz.LearnableTemperature(0.5)).double()
        if dist.is_initialized():
            loss = DistributedDataParallel(loss)
            loss.register_comm_hook(None, add_up)
        cz.DistributedLoss(loss, grad_reduction="sum")(rows, labels).backward()
        (parameter,) = loss.parameters()
        assert parameter.grad is not None
        return parameter.grad

    rows = numbers(N, D, seed=1)
    expected = temperature_gradient(rows, LABELS)

    def job() -> Tensor:
        return temperature_gradient(local_shard(rows, (3, 4)), local_shard(LABELS, (3, 4)))

    for gradient in worlds.run(2, job):
        close(gradient, expected)


def test_attributes_of_the_loss_are_set_through_the_wrapper() -> None:
    loss_fn = cz.DistributedLoss(cz.Triplet(margin=0.1))
    loss_fn.margin, loss_fn.check_equal, loss_fn._private, loss_fn.other = 0.7, False, 1, 2
    assert loss_fn.loss.margin == loss_fn.margin == 0.7
    assert vars(loss_fn).keys() >= {"check_equal", "_private", "other"}
    assert not vars(loss_fn.loss).keys() & {"check_equal", "_private", "other"}
