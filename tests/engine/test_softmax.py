"""Log-sum-exps in tiles equal the dense ones: on any number of ranks, in either arithmetic, cached or recomputed."""

import itertools
import weakref
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from contrastive_zoo.engine import exchange, softmax, tiling
from contrastive_zoo.engine.exchange import RankBlock
from contrastive_zoo.engine.softmax_arithmetic import ExactSums
from contrastive_zoo.engine.softmax_sweep import SoftmaxSweep, gradient_buffer
from contrastive_zoo.ranks import transport
from contrastive_zoo.ranks.world import Shards, World
from tests.helpers import drawn, numbers
from tests.random_steps.losses import LOSSES, RINGS
from tests.random_steps.rank import play
from tests.random_steps.test_random_steps import SHARED

SHARDS = {
    2: [(5, 4), (9, 0), (5, 5)],
    3: [(3, 4, 2), (0, 9, 0), (3, 3, 3)],
    5: [(2, 1, 3, 1, 2), (0, 4, 0, 5, 1), (2,) * 5],
}
SWEPT = ("NTXent", "NTXent, three views", "NTXent, learnt", "Clip", "SupCon", "InfoNCE with negatives", "SINCERE",
         "MultiPositive, symmetric", "MNRL, symmetric", "SigLIP, learnt")  # fmt: skip
"""Losses whose sums go in tiles: of one tower, of two, with several partners, pairs that are left out, learnt scales."""


def program(world_size: int, name: str, budget: int | None, ring: bool) -> list[Any]:
    """Steps; then at a temperature that one shift cannot hold, or of norms that are not known; then of 16 bits."""
    steps: list[Any] = [("step", {"batches": [sizes]}) for sizes in SHARDS[world_size]]
    options: list[Any] = [("set_budget", {"size": budget}), ("set_option", {"ring": ring and name in RINGS})]
    value = {"temperature": 0.001, "normalize": False}.get((LOSSES[name].setting or ("",))[0])
    other: list[Any] = [] if value is None else [("set_setting", {"value": value})]
    return [*options, *steps, *other, *steps, ("set_precision", {"precision": "autocast"}), *steps]


def by_backend(shards: Shards, world: World) -> bool:
    """As NCCL sums rows of even shards; gloo's reduce-scatter stands in for it."""
    return len(set(shards.sizes)) == 1


SCATTERS = {f"{module}.scatters_sums": by_backend for module in ("ranks.transport", "engine.exchange")}
CASES = drawn(SWEPT, SHARDS, [0, None], [False, True], [False, True], one_in=4)


@pytest.mark.parametrize(("name", "world_size", "budget", "ring", "scatters"), CASES, ids=str)
def test_sums_in_tiles_are_those_of_one_process(name, world_size, budget, ring, scatters, worlds) -> None:
    def job() -> int:
        with patch.object(transport, "reduce_scatter_single", wraps=transport.reduce_scatter_single) as calls:
            play(name, SHARED | (SCATTERS if scatters else {}), program(world_size, name, budget, ring))
        return calls.call_count

    gathers_all = not name.startswith(("NTXent", "SupCon")) and not (ring and name in RINGS)
    assert {calls > 0 for calls in worlds.run(world_size, job)} == {scatters and gathers_all}


def alone(n: int) -> dict[str, Any]:
    """Return what is known of so many rows on one process."""
    return {"row_shards": Shards((n,)), "world": World(), "arithmetic": "tiles"}


def test_each_pair_of_ranks_is_computed_once_and_the_load_is_even() -> None:
    for size in range(1, 9):
        sizes = tuple(8 + rank % 2 for rank in range(size))
        met, load = torch.zeros(sum(sizes), sum(sizes)), []
        for rank in range(size):
            shards = Shards(sizes, rank)
            cells = -(shards.size**2) / 2  # of my own block half is computed
            for block in exchange.schedule(shards, shards, half=True):
                start = sum(sizes[: block.ahead])
                met[shards.local][block.rows, start + block.columns.start : start + block.columns.stop] += 1
                cells += (block.rows.stop - block.rows.start) * (block.columns.stop - block.columns.start)
            load.append(cells)
        pairs = met + met.T
        for rank in range(size):  # my own block, computed from its diagonal up, stands for itself
            own = Shards(sizes, rank).local
            pairs[own, own] = 1
        assert (pairs == 1).all()
        assert max(load) <= 1.25 * min(load), load  # sizes differ by an eighth, products by two


def test_a_rank_sends_the_columns_that_the_other_compares() -> None:
    for size, half in itertools.product(range(1, 9), (True, False)):
        sizes = tuple((5 * rank) % 4 for rank in range(size))
        of = [exchange.schedule(x, x, half=half) for x in (Shards(sizes, rank) for rank in range(size))]
        for rank, blocks in enumerate(of):
            for step, block in enumerate(blocks):
                receiver = of[block.behind][step]
                assert (receiver.ahead, receiver.columns) == (rank, block.sent)


@pytest.mark.parametrize(("scale", "exact"), [(10.0, False), (39.0, False), (100.0, False), (1e4, True)])
def test_one_exponential_where_it_can(scale: float, exact: bool) -> None:
    """At CLIP's largest scale, float32 and rows that have some neighbour, too."""
    z = torch.nn.functional.normalize(numbers(64, 32, seed=0).float(), dim=1)
    with patch.object(ExactSums, "transform", autospec=True, side_effect=ExactSums.transform) as transform:
        found, *_ = softmax.log_sum_exps(z, scale=scale, unit_norm=True, **alone(64))
    s = (scale * z.double() @ z.double().T).fill_diagonal_(-torch.inf)
    assert transform.called == exact
    torch.testing.assert_close(found.double(), s.logsumexp(1), rtol=1e-6, atol=2e-5 * scale / 10)


@pytest.mark.parametrize("scale", [100.0, torch.tensor(100.0)], ids=["a number", "learnt"])
def test_the_length_of_16_bit_embeddings_changes_no_bit(scale: float | Tensor) -> None:
    """Up to 1.8e19: the square of a longer one overflows in float32."""
    factors = [torch.nn.functional.normalize(numbers(40, 8, seed=seed), dim=1).bfloat16() for seed in (0, 1)]

    def outcome(length: float) -> list[Tensor]:
        rows = [x.float().requires_grad_() for x in factors]
        longer = [length * x for x in factors]
        r, c, _ = softmax.log_sum_exps(*rows, scale=scale, unit_norm=True, factors=longer, **alone(40))
        return [r, c, *torch.autograd.grad(r.sum() + 2 * c.sum(), rows)]

    assert all(map(torch.equal, outcome(2.0**63), outcome(1.0)))


def test_a_row_far_from_all_others_is_not_lost() -> None:
    """Its sum is below what a common shift can hold; without the second arithmetic R is off or infinite."""
    z = torch.zeros(5, 3)
    z[:4, 0], z[4, 0] = 1.0, -1.0
    r, *_ = softmax.log_sum_exps(z.requires_grad_(), scale=100.0, unit_norm=True, **alone(5))
    torch.testing.assert_close(r[4], torch.tensor(4.0).log() - 100)
    (g,) = torch.autograd.grad(r[4], z)
    torch.testing.assert_close(g[4], torch.tensor([100.0, 0, 0]), rtol=1e-5, atol=1e-5)


def test_a_column_far_from_all_rows_is_not_lost() -> None:
    """Every row has another column that it is close to; norms are known of no rows."""
    rows, columns = torch.tensor([[30.0, 0.0]] * 3), torch.tensor([[30.0, 0.0], [20.0, 20.0], [-1.0, 0.0]])
    r, c, _ = softmax.log_sum_exps(rows, columns, scale=1.0, **alone(3))
    s = rows.double() @ columns.double().T
    torch.testing.assert_close((r.double(), c.double()), (s.logsumexp(1), s.logsumexp(0)), rtol=1e-6, atol=0)


def test_similarities_that_lost_digits_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before others are made in the second arithmetic, which has the same budget."""
    sums, kept, alive = SoftmaxSweep.sums, [], []

    def watched(*args: Any) -> Any:
        alive.append(sum(x() is not None for x in kept))
        found = sums(*args)
        kept.extend(weakref.ref(x) for x in found[2] if x is not None)
        return found

    monkeypatch.setattr(SoftmaxSweep, "sums", watched)
    z = numbers(8, 4, seed=0).requires_grad_()
    r, *_ = softmax.log_sum_exps(z, scale=1e4, **alone(8))
    assert (alive, len(kept)) == ([0, 0], 2)
    assert kept[1]() is not None
    del r


def test_losses_that_wait_for_their_backward_passes_share_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose similarities no backward pass reads take none of it."""
    monkeypatch.setattr(tiling.CachedLogits, "_all", weakref.WeakSet())  # not those that wait in other tests
    answers, reserve = [], tiling.CachedLogits.reserve
    monkeypatch.setattr(tiling.CachedLogits, "reserve", lambda *of: answers.append(reserve(*of)) or answers[-1])

    def forward(*, learns: bool = True) -> Tensor:
        z = numbers(8, 4, seed=0).requires_grad_(learns)
        return softmax.log_sum_exps(z, scale=1.0, **alone(8))[0]

    def keeps(r: Tensor) -> bool:
        return any(x is not None and x.shape == (8, 8) for x in r.grad_fn.saved_tensors)

    with tiling.memory_budget(8 * 8 * 8 - 1):
        assert not keeps(forward())
    with tiling.memory_budget(8 * 8 * 8):
        forward(learns=False)
        with torch.no_grad():
            forward()
        assert answers[-2:] == [False, False]
        first, second = forward(), forward()
        assert (keeps(first), keeps(second)) == (True, False)
        first.sum().backward()
        third = forward()
        assert keeps(third)
        del third  # its backward pass never comes
        assert keeps(forward())


def test_rows_without_a_column_have_the_gradient_zero() -> None:
    torch.use_deterministic_algorithms(True)  # memory that nothing was written to is NaN
    try:
        for rows, columns in (((0, 2), (3, 3)), ((2, 2), (0, 3))):
            block = RankBlock(0, slice(*rows), slice(*columns), 0, slice(0, 0))
            assert gradient_buffer(torch.ones(2), block).tolist() == [0, 0]
    finally:
        torch.use_deterministic_algorithms(False)
