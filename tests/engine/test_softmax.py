"""Log-sum-exps in tiles equal the dense ones: on any number of ranks, in either arithmetic, cached or recomputed."""

import itertools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor

from contrastive_zoo.engine import exchange, softmax, tiling
from contrastive_zoo.engine.exchange import RankBlock
from contrastive_zoo.engine.softmax_arithmetic import ExactSums
from contrastive_zoo.engine.softmax_sweep import Partners, SoftmaxSweep, gradient_buffer
from contrastive_zoo.ranks import transport
from contrastive_zoo.ranks.session import Session
from contrastive_zoo.ranks.world import Shards, World
from contrastive_zoo.testing.messages import Messages
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EVERY_CASE, close, local_shard, numbers

SPLITS = [(9,), (5, 4), (7, 2), (9, 0), (3, 4, 2), (0, 9, 0), (2, 3, 1, 3), (0, 4, 0, 5), (2, 1, 3, 1, 2)]
COLUMNS = {1: (11,), 2: (3, 8), 3: (0, 6, 5), 4: (5, 0, 4, 2), 5: (2, 2, 3, 4, 0)}
D = 5


@dataclass(frozen=True)
class Options:
    ring: bool = False
    tile_bytes: int = 2**21
    keep: int = 0
    scale: float = 3.0
    unit_norm: bool = False
    dtype: torch.dtype | None = None
    partner_offsets: tuple[int, ...] = ()
    excludes: bool = False

    def excluded(self, n: int) -> Tensor | None:
        """With one tower the row that each row's sum also leaves out: the first leaves out the last, and so on inwards."""
        return torch.arange(n).flip(0) if self.excludes else None

    @property
    def nonzero_offsets(self) -> list[int]:
        return [step for step in self.partner_offsets if step]

    def rows(self, n: int, seed: int) -> Tensor:
        z = numbers(n, D, seed=seed)
        z = z if self.dtype is None else z.to(self.dtype).double()
        return torch.nn.functional.normalize(z, dim=1) if self.unit_norm else z

    def factors(self, n: int, seed: int, sizes: tuple[int, ...]) -> Tensor | None:
        if self.dtype is None:
            return None
        return local_shard(numbers(n, D, seed=seed).to(self.dtype), sizes)


OPTIONS = [
    Options(),
    Options(tile_bytes=64),
    Options(tile_bytes=64, keep=2**20),
    Options(ring=True),
    Options(ring=True, tile_bytes=64, keep=2**20),
    Options(scale=900.0),  # beyond what one shift can hold: a maximum for each row and column
    Options(scale=900.0, tile_bytes=64),
    Options(scale=900.0, ring=True, keep=2**20),
    Options(scale=700.0, unit_norm=True, tile_bytes=64),  # shifted, with u > 0
    Options(excludes=True),
    Options(excludes=True, tile_bytes=64, ring=True),
    Options(excludes=True, scale=900.0, tile_bytes=64, keep=2**20),
    Options(excludes=True, scale=900.0, partner_offsets=(1,), ring=True),
    Options(partner_offsets=(1, 0)),
    Options(partner_offsets=(4, 1), tile_bytes=64),
    Options(scale=900.0, partner_offsets=(0, 2, 3), tile_bytes=64, keep=2**20),
    # rows that came in 16 bits
    Options(dtype=torch.bfloat16, partner_offsets=(0, 1)),
    Options(dtype=torch.float16, partner_offsets=(2, 1), tile_bytes=64, keep=2**20),
    Options(dtype=torch.bfloat16, partner_offsets=(0, 3), tile_bytes=64, ring=True),
    Options(dtype=torch.bfloat16, unit_norm=True, partner_offsets=(0, 1), tile_bytes=64),
    Options(dtype=torch.float16, unit_norm=True, scale=900.0, partner_offsets=(2, 1), tile_bytes=64),
    Options(dtype=torch.bfloat16, unit_norm=True, partner_offsets=(1,), tile_bytes=64, ring=True, keep=2**20),
]


def weighed(positives: Iterable[Tensor]) -> Tensor:
    """Σ w·P of one rank."""
    return sum(((numbers(len(p), seed=5) * p).sum() for p in positives), torch.zeros(()))


def finite(x: Tensor) -> Tensor:
    """Σ x without the log-sum-exps of nothing."""
    return x.where(x.abs() != torch.inf, 0).sum()


def dense(options: Options, kind: str, sizes: tuple[int, ...], columns: tuple[int, ...]) -> list[Tensor]:
    """Σ w·R + Σ v·C + Σ w·P of one process, and its gradients by rows, columns and scale."""
    n, m = sum(sizes), sum(columns)

    def diagonals(s: Tensor, columns: tuple[int, ...], steps: Sequence[int]) -> list[list[Tensor]]:
        ranks = [(Shards(sizes, rank).local, Shards(columns, rank).local) for rank in range(len(sizes))]
        return [[s[i, j].diagonal(step) for step in steps] for i, j in ranks]

    def left_out(*partners: Any) -> Tensor:
        mask = torch.zeros(n, m, dtype=torch.bool)
        for entries in itertools.chain(*diagonals(mask, *partners)):
            entries.fill_(True)
        return mask

    a, b = (options.rows(count, seed).requires_grad_() for seed, count in ((1, n), (2, m)))
    scale = torch.tensor(options.scale).double().requires_grad_()
    w, v = numbers(n, seed=3), numbers(m, seed=4)
    if kind == "one tower":
        s, m, partners = scale * a @ a.T, n, (sizes, options.nonzero_offsets)
        mask = left_out(*partners)
        if options.excludes:
            mask |= torch.eye(n).bool().flip(0)
        r = s.masked_fill(torch.eye(n).bool() | mask | mask.T, -torch.inf).logsumexp(1)
        value = finite(w * r) + sum(map(weighed, diagonals(s, *partners)))
        return [value.detach(), *torch.autograd.grad(value, (a, scale))]
    s, partners = scale * a @ b.T, (columns, options.partner_offsets)
    others = s.masked_fill(left_out(*partners), -torch.inf)
    value = finite(w * others.logsumexp(1)) + sum(map(weighed, diagonals(s, *partners)))
    if kind == "two towers":
        value = value + finite(v * others.logsumexp(0))
    return [value.detach(), *torch.autograd.grad(value, (a, b, scale))]


def job(options: Options, kind: str, sizes: tuple[int, ...], columns: tuple[int, ...]) -> list[Tensor]:
    """This rank's share of the value, its rows' gradients, and its share of the scale's."""
    world = Session.of(World.of(), ring=options.ring)
    rank = world.rank
    a = local_shard(options.rows(sum(sizes), 1), sizes).requires_grad_()
    b = local_shard(options.rows(sum(columns), 2), columns).requires_grad_()
    w, v = local_shard(numbers(sum(sizes), seed=3), sizes), local_shard(numbers(sum(columns), seed=4), columns)
    scale = torch.tensor(options.scale, dtype=torch.float64, requires_grad=True)
    rows, cols = Shards(sizes, rank), Shards(columns, rank)
    settings: Any = {"scale": scale, "unit_norm": options.unit_norm, "world": world, "arithmetic": "tiles"}
    of_rows, of_columns = options.factors(sum(sizes), 1, sizes), options.factors(sum(columns), 2, columns)
    with patch.object(tiling, "TILE_BYTES", options.tile_bytes), tiling.memory_budget(options.keep):
        if kind == "one tower":
            excluded = options.excluded(sum(sizes))
            excluded = None if excluded is None else local_shard(excluded, sizes)
            r, _, p = softmax.log_sum_exps(
                a, factors=None if of_rows is None else [of_rows], partners=Partners(options.nonzero_offsets),
                excluded=excluded, row_shards=rows, **settings,
            )  # fmt: skip
            value = finite(w * r) + weighed(p)
            return [value.detach(), *torch.autograd.grad(value, (a, scale))]
        r, c, p = softmax.log_sum_exps(
            a, b, factors=None if of_rows is None or of_columns is None else (of_rows, of_columns),
            row_shards=rows, column_shards=cols, columnwise=kind == "two towers",
            partners=Partners(options.partner_offsets), **settings,
        )  # fmt: skip
        value = finite(w * r) + (0 if c is None else finite(v * c)) + weighed(p)
        return [value.detach(), *torch.autograd.grad(value, (a, b, scale))]


def together(found: list[list[Tensor]]) -> list[Tensor]:
    """Values and scales' gradients add up, rows stand in rank order."""
    parts = list(zip(*found, strict=True))
    return [sum(parts[0]), *(torch.cat(part) for part in parts[1:-1]), sum(parts[-1])]


def alone(n: int) -> dict[str, Any]:
    """Return what is known of so many rows on one process."""
    return {"row_shards": Shards((n,)), "world": World(), "arithmetic": "tiles"}


KINDS = ("one tower", "two towers", "rows alone")


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_it_is_the_dense_log_sum_exp(sizes: tuple[int, ...], worlds: Worlds) -> None:
    columns = COLUMNS[len(sizes)]
    half = slice(None) if EVERY_CASE else slice(SPLITS.index(sizes) % 2, None, 2)
    every = list(itertools.product(OPTIONS, KINDS))[half]
    found = worlds.run(len(sizes), lambda: [job(options, kind, sizes, columns) for options, kind in every])
    for (options, kind), of_ranks in zip(every, zip(*found, strict=True), strict=True):
        expected = dense(options, kind, sizes, columns)
        for x, y in zip(together(list(of_ranks)), expected, strict=True):
            close(x, y)


@pytest.mark.parametrize("sizes", [(5, 5), (3, 3, 3), (1, 1), (4, 5)], ids=str)
def test_where_the_backend_scatters_sums_itself(sizes: tuple[int, ...], worlds: Worlds) -> None:
    """As NCCL does of even shards; here gloo's reduce-scatter stands in for it."""
    every = list(itertools.product(OPTIONS[:3], KINDS))

    def evenly(shards: Shards, world: World) -> bool:
        return len(set(shards.sizes)) == 1

    def jobs() -> list[list[Tensor]]:
        with pytest.MonkeyPatch.context() as patching:
            for module in (transport, exchange):
                patching.setattr(module, "scatters_sums", evenly)
            calls = Mock(side_effect=transport.reduce_scatter_single)
            patching.setattr(transport, "reduce_scatter_single", calls)
            results = [job(options, kind, sizes, sizes) for options, kind in every]
            return [*results, [torch.tensor(calls.call_count)]]

    *found, calls = zip(*worlds.run(len(sizes), jobs), strict=True)
    for (options, kind), of_ranks in zip(every, found, strict=True):
        for x, y in zip(together(list(of_ranks)), dense(options, kind, sizes, sizes), strict=True):
            close(x, y)
    two_towers = 2 * len(OPTIONS[:3])
    least = two_towers if len(set(sizes)) == 1 else 0
    assert all(int(x) >= least and bool(x) == bool(least) for (x,) in calls)


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


def calls_of(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    made: list[Any] = []
    original = getattr(ExactSums, name)
    monkeypatch.setattr(ExactSums, name, lambda self, *args: (made.append(args), original(self, *args))[1])
    return made


@pytest.mark.parametrize(("scale", "exact"), [(10.0, False), (39.0, False), (100.0, False), (1e4, True)])
def test_one_exponential_where_it_can(scale: float, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At CLIP's largest scale, float32 and rows that have some neighbour, too."""
    made = calls_of(monkeypatch, "transform")
    z = torch.nn.functional.normalize(numbers(64, 32, seed=0).float(), dim=1)
    found, *_ = softmax.log_sum_exps(z, scale=scale, unit_norm=True, **alone(64))
    s = (scale * z.double() @ z.double().T).fill_diagonal_(-torch.inf)
    assert bool(made) == exact
    torch.testing.assert_close(found.double(), s.logsumexp(1), rtol=1e-6, atol=2e-5 * scale / 10)


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
    assert c is not None
    torch.testing.assert_close((r.double(), c.double()), (s.logsumexp(1), s.logsumexp(0)), rtol=1e-6, atol=0)


@pytest.fixture
def no_pending_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget losses of other tests whose backward pass never ran, and which Python has not collected yet."""
    monkeypatch.setattr(tiling.CachedLogits, "_all", weakref.WeakSet())


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


@pytest.mark.usefixtures("no_pending_backward")
def test_losses_that_wait_for_their_backward_passes_share_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose similarities no backward pass reads take none of it."""
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


def test_the_backward_pass_gathers_nothing_again(worlds: Worlds) -> None:
    def of_pass(make: Any) -> tuple[Any, int]:
        with Messages() as messages:
            found = make()
        return found, len(messages.sent)

    def job() -> tuple[int, int]:
        world = World.of()
        a, b = (numbers(4, 3, seed=seed + world.rank).requires_grad_() for seed in (0, 2))
        step: Any = {"row_shards": Shards((4, 4), world.rank), "world": world, "arithmetic": "tiles"}
        (r, _, _), forward = of_pass(
            lambda: softmax.log_sum_exps(a, b, scale=1.0, columnwise=False, unit_norm=True, **step)
        )
        return forward, of_pass(lambda: r.sum().backward())[1]

    for forward, backward in worlds.run(2, job):
        assert (forward, backward) == (1, 2)  # columns; a header and their gradients


def test_the_budget_is_a_number_of_bytes() -> None:
    with pytest.raises(ValueError, match="0 or more, got -1"), tiling.memory_budget(-1):
        pass


def test_rows_without_a_column_have_the_gradient_zero() -> None:
    torch.use_deterministic_algorithms(True)  # memory that nothing was written to is NaN
    try:
        for rows, columns in (((0, 2), (3, 3)), ((2, 2), (0, 3))):
            block = RankBlock(0, slice(*rows), slice(*columns), 0, slice(0, 0))
            assert gradient_buffer(torch.ones(2), block).tolist() == [0, 0]
    finally:
        torch.use_deterministic_algorithms(False)
