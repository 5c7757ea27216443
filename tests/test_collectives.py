"""Every collective: its values in any dtype, its adjoint, and that each adjoint could have been wrong."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import contrastive_zoo as cz
from contrastive_zoo.ranks import transport
from contrastive_zoo.ranks import world as world_module
from contrastive_zoo.ranks.adjoints import extreme_shares
from contrastive_zoo.ranks.world import Shards, World
from contrastive_zoo.testing.messages import Messages
from contrastive_zoo.testing.strategies import splits
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EXACT, close, common_error, distance, error_message, groups, numbers

DTYPES = [torch.int64, torch.int32, torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHARDS = splits((1, 2, 3, 4), min_samples=0, max_per_rank=3)
ROOTS = st.integers(0, 3)


# ------------------------------------------------------------------------------------------------- a table of them all

Run = Callable[[Tensor, "At"], Tensor]


@dataclass(frozen=True)
class Collective:
    """One collective in one mode, on this rank's x."""

    run: Callable[[Tensor, "At"], Tensor]  # ``run(x, at)``
    expected: Callable[[list[Tensor], "At"], list[Tensor]]  # computes every rank's result from all ranks' x
    wrong_adjoint: Callable[[Tensor, Tensor, "At"], Tensor]  # ``wrong_adjoint(dy, x, at)``, a mistake that people make
    # how many rows each rank brings: its ``"own"``, as many as ``"all"``, or all on the root, one elsewhere
    brings: str = "own"


@dataclass(frozen=True)
class At:
    """The shard sizes, and the root."""

    sizes: tuple[int, ...]
    root: int = 0
    rank: int = 0
    group: Any = field(default=None, compare=False)

    @property
    def shards(self) -> Shards:
        return Shards(self.sizes, self.rank)

    @property
    def is_root(self) -> bool:
        return self.rank == self.root

    def rows(self, brings: str) -> int:
        total = sum(self.sizes)
        return {"own": self.sizes[self.rank], "all": total, "root": total if self.is_root else 1}[brings]


def _sum(xs: Sequence[Tensor]) -> Tensor:
    """In the dtype of the terms, 16-bit numbers in 32; of booleans, whether any is true."""
    stacked = torch.stack(list(xs))
    return stacked.any(0) if stacked.dtype == torch.bool else stacked.sum(0, dtype=stacked.dtype)


def _mean(xs: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(xs)).double().mean(0).to(xs[0].dtype)


def _extreme(op: str) -> Callable[[Sequence[Tensor]], Tensor]:
    return lambda xs: getattr(torch.stack(list(xs)), f"a{op}")(0)


REDUCED = {"sum": _sum, "mean": _mean, "max": _extreme("max"), "min": _extreme("min")}


def all_reduce(op: str) -> Collective:
    return Collective(
        lambda x, at: cz.collectives.all_reduce(x, op, process_group=at.group),
        lambda xs, at: [REDUCED[op](xs)] * len(xs),
        lambda dy, x, at: dy,
        brings="all",
    )


def reduce(op: str) -> Collective:
    def expected(xs: list[Tensor], at: At) -> list[Tensor]:
        total = REDUCED[op](xs)
        return [total if rank == at.root else torch.zeros_like(total) for rank in range(len(xs))]

    return Collective(
        lambda x, at: cz.collectives.reduce(x, at.root, op, process_group=at.group),
        expected,
        lambda dy, x, at: dy * at.is_root,
        brings="all",
    )


def reduce_scatter(op: str) -> Collective:
    return Collective(
        lambda x, at: cz.collectives.reduce_scatter(x, shards=at.shards, op=op, process_group=at.group),
        lambda xs, at: list(REDUCED[op](xs).split(list(at.sizes))),
        lambda dy, x, at: _in_own_slice(dy, x, at),
        brings="all",
    )


def _in_own_slice(dy: Tensor, x: Tensor, at: At) -> Tensor:
    dx = torch.zeros_like(x)
    if len(x) == sum(at.sizes):
        dx[at.shards.local] = dy
    return dx


def _gathered(xs: list[Tensor], at: At) -> list[Tensor]:
    return [torch.cat(xs) if rank == at.root else xs[0][:0] for rank in range(len(xs))]


LINEAR = {
    "all_reduce sum": all_reduce("sum"),
    "all_reduce mean": all_reduce("mean"),
    "reduce sum": reduce("sum"),
    "reduce mean": reduce("mean"),
    "reduce_scatter sum": reduce_scatter("sum"),
    "reduce_scatter mean": reduce_scatter("mean"),
    "broadcast": Collective(
        lambda x, at: cz.collectives.broadcast(x, at.root, process_group=at.group),
        lambda xs, at: [xs[at.root]] * len(xs),
        lambda dy, x, at: dy * at.is_root,
        brings="all",
    ),
    "all_gather": Collective(
        lambda x, at: cz.collectives.all_gather(x, process_group=at.group),
        lambda xs, at: [torch.cat(xs)] * len(xs),
        lambda dy, x, at: dy[at.shards.local],
    ),
    "gather": Collective(
        lambda x, at: cz.collectives.gather(x, at.root, process_group=at.group),
        _gathered,
        lambda dy, x, at: dy[at.shards.local] if at.is_root else torch.zeros_like(x),
    ),
    "scatter": Collective(
        lambda x, at: cz.collectives.scatter(x, at.sizes if at.is_root else None, src=at.root, process_group=at.group),
        lambda xs, at: list(xs[at.root].split(list(at.sizes))),
        _in_own_slice,
        brings="root",
    ),
}
ALL = LINEAR | {f"{run.__name__} {op}": run(op) for run in (all_reduce, reduce) for op in ("max", "min")}
by_name = pytest.mark.parametrize("name", ALL)


def place(sizes: Sequence[int], root: int, rank: int = 0, group: Any = None) -> At:
    return At(tuple(sizes), root % len(sizes), rank, group)


# -------------------------------------------------------------------------------------------------------------- values


@by_name
@given(sizes=SHARDS, root=ROOTS, trailing=st.sampled_from([(), (3,), (2, 2)]), seed=st.integers(0, 99))
def test_values_are_right_in_every_dtype(name: str, sizes, root, trailing, seed, worlds: Worlds) -> None:
    collective = ALL[name]
    dtypes = [dtype for dtype in DTYPES if dtype.is_floating_point or not name.endswith("mean")]

    def brought(rank: int, dtype: torch.dtype) -> Tensor:
        return numbers(place(sizes, root, rank).rows(collective.brings), *trailing, seed=seed + rank, dtype=dtype)

    def job(directly_below: int) -> list[Tensor]:
        at = place(sizes, root, dist.get_rank())
        xs = [brought(at.rank, dtype) for dtype in dtypes]
        with warnings.catch_warnings(), patch.object(world_module, "_SMALL", directly_below):
            warnings.simplefilter("error")
            results = [collective.run(x, at) for x in xs]
        assert all(torch.equal(x, brought(at.rank, dtype)) for x, dtype in zip(xs, dtypes, strict=True)), "changed"
        return results

    for directly_below in (2**30, -1):  # every message goes to each other rank directly, or none does
        found = worlds.run(len(sizes), job, directly_below)
        for index, dtype in enumerate(dtypes):
            expected = collective.expected([brought(rank, dtype) for rank in range(len(sizes))], place(sizes, root))
            for rank, value in enumerate(expected):
                close(found[rank][index], value, 1e-6 if dtype == torch.float32 else 1e-12)


SUMS = [cz.collectives.all_reduce, cz.collectives.reduce, cz.collectives.reduce_scatter]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
@pytest.mark.parametrize("run", SUMS, ids=lambda run: run.__name__)
def test_a_mean_of_integers_is_the_same_on_one_process_and_two(run, dtype, worlds: Worlds) -> None:
    def job() -> list:
        results: list[Tensor] = []
        split = Shards((2, 0)[: dist.get_world_size()], dist.get_rank())
        shards = {"shards": split} if run is cz.collectives.reduce_scatter else {}
        x = torch.tensor([1, 0]).to(dtype)
        return [error_message(lambda: results.append(run(x, op="mean", **shards))), *results]

    (refusal, *alone), (also_refusal, *together) = worlds.run(1, job)[0], worlds.run(2, job)[0]
    assert refusal == also_refusal
    for found, expected in zip(together, alone, strict=True):
        assert found.is_floating_point()
        close(found, expected)


def test_16_bit_numbers_are_summed_in_32_bits(worlds: Worlds) -> None:
    # bfloat16 counts 256, 258, 260: 256 + 1 is 256 again, but 256 + 1 + 1 + 1 is 259 and rounds once, to 260
    def job() -> list[list[float]]:
        x = torch.ones(4, dtype=torch.bfloat16)
        x[dist.get_rank()] = 256
        naive = x.clone()
        dist.all_reduce(naive)
        return [y.tolist() for y in (*(run(x) for run in SUMS), naive)]

    found = worlds.run(4, job)
    everywhere, on_root, scattered, naive = zip(*found, strict=True)
    assert {y for ys in (*everywhere, on_root[0], *scattered) for y in ys} == {260.0}
    assert set(naive[0]) != {260.0}


def test_a_collective_is_one_message(worlds: Worlds) -> None:
    """After the handshake, which a known split saves. An extreme needs another one or two, for how many ranks attain it."""

    def job() -> list[int]:
        counts, x = [], torch.ones(3)
        for call in (
            *(lambda op=op: cz.collectives.all_reduce(x, op) for op in ("sum", "mean", "max")),
            *(lambda op=op: cz.collectives.reduce(x, op=op) for op in ("sum", "mean", "max")),
            lambda: cz.collectives.all_gather(x),
            lambda: cz.collectives.all_gather(x, shards=Shards((3, 3), dist.get_rank())),
        ):
            with Messages() as messages:
                call()
            counts.append(len(messages.sent))
        return counts

    assert worlds.run(2, job) == [[2, 2, 3, 2, 2, 4, 2, 1]] * 2


def test_a_mean_where_the_backend_scatters_sums_itself(worlds: Worlds) -> None:
    """As NCCL does; here gloo's reduce-scatter stands in for it."""

    def job() -> list[list[float]]:
        before, transport.scatters_sums = transport.scatters_sums, lambda shards, world: True
        try:
            rows = torch.tensor([[1.0], [3.0]]) + 4 * dist.get_rank()
            return [cz.collectives.reduce_scatter(rows, op=op).flatten().tolist() for op in ("sum", "mean")]
        finally:
            transport.scatters_sums = before

    assert worlds.run(2, job) == [[[6.0], [3.0]], [[10.0], [5.0]]]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.T,
    "every other row": lambda x: x[::2],
    "every other column": lambda x: x[:, ::2],
    "a column, in the middle": lambda x: x[:, 1:2],
    "a column of a transposed one, which counts as contiguous": lambda x: x.T[:, :1],
    "one row for all": lambda x: x[:1].expand(4, 4),
    "one number for all": lambda x: x[:1, :1].expand(4, 4),
    "one number": lambda x: x[0, 0].expand(1, 1),
    "no rows, expanded": lambda x: x[0, 0].expand(0, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_may_have_any_strides(layout: str, worlds: Worlds) -> None:
    def job() -> list[list[Tensor]]:
        strided = LAYOUTS[layout](numbers(4, 4, seed=dist.get_rank()))
        return [
            [run(x) for run in RUNS.values()] for x in (strided, strided.clone(memory_format=torch.contiguous_format))
        ]

    for found, expected in worlds.run(2, job):
        for y, z in zip(found, expected, strict=True):
            close(y, z)


def test_rows_are_split_as_tensor_split_does_unless_told(worlds: Worlds) -> None:
    def job() -> list[list[int]]:
        x = torch.arange(5)
        return [cz.collectives.scatter(x).tolist(), (cz.collectives.reduce_scatter(x) // 3).tolist()]

    parts = [part.tolist() for part in torch.arange(5).tensor_split(3)]
    assert worlds.run(3, job) == [[part, part] for part in parts]


# ------------------------------------------------------------------------------------------------------------ adjoints


class Mutant(torch.autograd.Function):
    """A collective's values with another backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.adjoint = adjoint
        return run(x).clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.adjoint(dy), None, None


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_replicated_parameter_gets_the_sum_of_all_ranks_gradients(size: int, worlds: Worlds) -> None:
    def job() -> Tensor:
        x = numbers(2, 3, seed=0).requires_grad_()
        y = cz.collectives.replicated(x)
        assert torch.equal(x, y)
        (y * numbers(2, 3, seed=1 + dist.get_rank())).sum().backward()
        return x.grad

    for gradient in worlds.run(size, job):
        close(gradient, sum(numbers(2, 3, seed=1 + rank) for rank in range(size)))


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (1, 1)], ids=str)
@by_name
def test_a_sum_goes_backward_through_a_result_without_or_with_one_number(name: str, sizes, worlds: Worlds) -> None:
    """The gradient of a sum is an expanded number, which counts as contiguous when it is so small."""
    collective = ALL[name]

    def job() -> bool:
        at = place(sizes, 1, dist.get_rank())
        x = torch.ones(at.rows(collective.brings), 1, requires_grad=True)
        collective.run(x, at).sum().backward()
        return [*x.grad.shape] == [*x.shape]

    assert worlds.run(2, job) == [True, True]


# ------------------------------------------------------------------------------------- against one process, non-linear


def partial_loss(value: Tensor, rank: int) -> Tensor:
    """Return rank ``rank``'s part of L."""
    return (numbers(*value.shape, seed=40 + rank) * value**2).sum() + value.sin().sum()


def ties(rank: int, at: At, brings: str, seed: int) -> Tensor:
    """Small whole numbers, so that ranks often hold the same maximum."""
    generator = torch.Generator().manual_seed(seed + rank)
    return torch.randint(0, 3, (at.rows(brings), 2), generator=generator).double()


def error(
    worlds: Worlds, name: str, run: Run, sizes: Sequence[int], root: int, seed: int, complete: bool = False
) -> float:
    """The largest error of any rank's gradient of L, of which each rank computes a part, or all of it if ``complete``."""
    brings = ALL[name].brings

    def job() -> Tensor:
        at = place(sizes, root, dist.get_rank())
        x = ties(at.rank, at, brings, seed).requires_grad_()
        return torch.autograd.grad(partial_loss(run(x, at), 0 if complete else at.rank), x)[0]

    xs = [ties(rank, place(sizes, root, rank), brings, seed).requires_grad_() for rank in range(len(sizes))]
    outputs = ALL[name].expected(xs, place(sizes, root))[: 1 if complete else None]
    total = sum((partial_loss(y, rank) for rank, y in enumerate(outputs)), torch.zeros(()))
    expected = torch.autograd.grad(total, xs, allow_unused=True, materialize_grads=True)
    return max(distance(*pair) for pair in zip(worlds.run(len(sizes), job), expected, strict=True))


@by_name
@given(sizes=SHARDS, root=ROOTS, seed=st.integers(0, 99))
def test_gradients_are_those_of_one_process_also_at_ties(name: str, sizes, root, seed, worlds: Worlds) -> None:
    assert error(worlds, name, ALL[name].run, sizes, root, seed) <= EXACT


COMPLETE: dict[str, Run] = {
    **{
        f"all_reduce {op}": lambda x, at, op=op: cz.collectives.all_reduce(x, op, gradient="complete") for op in REDUCED
    },
    "all_gather": lambda x, at: cz.collectives.all_gather(x, gradient="complete"),
}


@pytest.mark.parametrize("name", COMPLETE)
@given(sizes=SHARDS, seed=st.integers(0, 99))
def test_complete_means_that_every_rank_computes_the_same_from_the_result(name, sizes, seed, worlds: Worlds) -> None:
    assert error(worlds, name, COMPLETE[name], sizes, 0, seed, complete=True) <= EXACT


def maximum(x: Tensor) -> Tensor:
    return cz.collectives.all_reduce(x.detach(), "max")


WRONG = [(name, collective.wrong_adjoint) for name, collective in LINEAR.items()] + [
    ("all_reduce max", lambda dy, x, at: maximum(dy) * extreme_shares(x, maximum(x), World.of())),
    ("all_reduce max", lambda dy, x, at: cz.collectives.all_reduce(dy) * (x == maximum(x))),  # ties do not share
]


@pytest.mark.parametrize(("name", "adjoint"), WRONG)
def test_a_wrong_adjoint_is_detected(name: str, adjoint: Callable[..., Tensor], worlds: Worlds) -> None:
    def mutant(x: Tensor, at: At) -> Tensor:
        return Mutant.apply(x, lambda x: ALL[name].run(x, at), lambda dy: adjoint(dy, x, at))

    assert error(worlds, name, mutant, (2, 1, 3), 1, seed=0) > 1e-3


@pytest.mark.parametrize("name", LINEAR)
@given(sizes=SHARDS, root=ROOTS)
def test_collectives_can_be_differentiated_twice(name: str, sizes, root, worlds: Worlds) -> None:
    collective = LINEAR[name]

    def brought(rank: int, seed: int) -> Tensor:
        return numbers(place(sizes, root, rank).rows(collective.brings), 2, seed=seed + rank)

    def job() -> Tensor:
        at = place(sizes, root, dist.get_rank())
        x = brought(at.rank, 10).requires_grad_()
        value = partial_loss(collective.run(x, at) ** 2, at.rank)
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        (gradient * brought(at.rank, 50)).sum().backward()
        return x.grad

    ranks = range(len(sizes))
    xs = [brought(rank, 10).requires_grad_() for rank in ranks]
    outputs = collective.expected(xs, place(sizes, root))
    total = sum(partial_loss(outputs[rank] ** 2, rank) for rank in ranks)
    gradients = torch.autograd.grad(total, xs, create_graph=True, allow_unused=True, materialize_grads=True)
    again = sum((gradient * brought(rank, 50)).sum() for rank, gradient in enumerate(gradients))
    expected = torch.autograd.grad(again, xs, allow_unused=True, materialize_grads=True)
    for found, wanted in zip(worlds.run(len(sizes), job), expected, strict=True):
        close(found, wanted)


# -------------------------------------------------------------------------------------------- groups, meshes, worlds


@by_name
@pytest.mark.parametrize("of", [([1, 3], [0, 2]), ([3, 1, 0], [2])], ids=str)
def test_ranks_are_counted_within_a_group_while_another_group_works(name: str, of, worlds: Worlds) -> None:
    collective = ALL[name]
    members = [sorted(ranks) for ranks in of]

    def sizes_of(ranks: Sequence[int]) -> tuple[int, ...]:
        return (2, 1, 0)[: len(ranks)]

    def brought(process: int) -> Tensor:
        ranks = next(ranks for ranks in members if process in ranks)
        at = place(sizes_of(ranks), 1, ranks.index(process))
        return numbers(at.rows(collective.brings), 2, seed=process)

    def job() -> Tensor:
        process = dist.get_rank()
        ranks = next(ranks for ranks in members if process in ranks)
        with groups(*of) as group:
            x = brought(process).requires_grad_()
            y = collective.run(x, place(sizes_of(ranks), 1, ranks.index(process), group))
            y.sum().backward()
            return y

    found = worlds.run(4, job)
    for ranks in members:
        expected = collective.expected([brought(process) for process in ranks], place(sizes_of(ranks), 1))
        for process, value in zip(ranks, expected, strict=True):
            close(found[process], value)


def test_a_device_mesh_of_one_dimension_names_a_group(worlds: Worlds) -> None:
    def job() -> tuple[list[list[int]], str | None]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        whole, x = init_device_mesh("cpu", (4,)), torch.tensor([dist.get_rank()])
        found = [
            cz.collectives.all_gather(x, process_group=group).tolist() for group in (mesh["dp"], mesh["tp"], whole)
        ]
        refusal = error_message(lambda: cz.collectives.all_gather(x, process_group=mesh))
        dist.barrier()
        for group in mesh.get_all_groups():
            dist.destroy_process_group(group)
        return found, refusal

    for rank, (found, refusal) in enumerate(worlds.run(4, job)):
        assert found == [[rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1], [0, 1, 2, 3]]
        assert refusal is not None
        assert "device mesh of 2 dimensions" in refusal
        assert "mesh['dp']" in refusal


def test_a_process_outside_the_group_raises(worlds: Worlds) -> None:
    def job() -> str | None:
        group = dist.new_group([0, 2])
        text = error_message(lambda: cz.collectives.all_reduce(torch.ones(1), process_group=group))
        dist.barrier()
        if dist.get_rank() != 1:
            dist.destroy_process_group(group)
        return text

    inside, outside, also_inside = worlds.run(3, job)
    assert inside is None
    assert also_inside is None
    assert outside is not None
    assert "process 1 is not in the group" in outside


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=4))
def test_texts_of_any_length_are_exchanged(texts: list[str], worlds: Worlds) -> None:
    found = worlds.run(len(texts), lambda text: World.of().exchange_text(text), each=[(text,) for text in texts])
    assert found == [texts] * len(texts)


# -------------------------------------------------------------------------------------------------------------- errors

RUNS: dict[str, Callable[..., Tensor]] = {
    name: getattr(cz.collectives, name)
    for name in ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter")
}
NO_ROOT, NO_OP = "rank {} is not one of the group's ranks 0 … 1", "op is one of sum, mean, max, min, got {}"
NO_GRADIENT = "'partial' or 'complete', got 'whole'"

x = torch.ones(2, 3)
SAME_MISTAKE: dict[str, tuple[Callable[[], Any], str]] = {
    f"{name} of a list": (partial(run, [1.0]), f"{name}: x must be a tensor, got list.") for name, run in RUNS.items()
} | {
    f"{name} of a number": (partial(RUNS[name], torch.tensor(1.0)), "at least one dimension")
    for name in ("all_gather", "gather", "scatter", "reduce_scatter")
}
SAME_MISTAKE |= {
    f"{name} {what}": (partial(RUNS[name], *args, **named), words)
    for name, what, args, named, words in (
        ("scatter", "of a sparse tensor", (torch.eye(2).to_sparse(),), {}, "scatter: x must be a dense tensor"),
        ("scatter", "sizes of a word", (x, "ab"), {}, "scatter: sizes are 2 integers, one per rank, got 'ab'"),
        ("all_reduce", "op of a list", (x, []), {}, NO_OP.format([])),
        ("all_reduce", "op", (x, "prod"), {}, NO_OP.format("'prod'")),
        ("reduce", "op", (x,), {"op": "prod"}, NO_OP.format("'prod'")),
        ("reduce_scatter", "op", (x,), {"op": "max"}, "op is 'sum' or 'mean', got 'max'"),
        ("all_reduce", "gradient", (x,), {"gradient": "whole"}, NO_GRADIENT),
        ("all_gather", "gradient", (x,), {"gradient": "whole"}, NO_GRADIENT),
        ("reduce", "root", (x, 7), {}, NO_ROOT.format(7)),
        ("broadcast", "root", (x, -1), {}, NO_ROOT.format(-1)),
        ("gather", "root", (x, 2), {}, NO_ROOT.format(2)),
        ("scatter", "root", (x,), {"src": 2}, NO_ROOT.format(2)),
        ("scatter", "sizes", (x, [1, 5]), {}, "add up to the 2 rows of rank 0, got [1, 5]"),
        ("scatter", "too few sizes", (x, [2]), {}, "must be 2 numbers"),
        ("scatter", "negative size", (x, [3, -1]), {}, "got [3, -1]"),
        ("reduce_scatter", "shards", (x,), {"shards": Shards((1, 4))}, "shards [1, 4] hold 5 rows, got 2"),
    )
}


def good() -> list[float]:
    return cz.collectives.all_gather(torch.tensor([float(dist.get_rank())])).tolist()


@pytest.mark.parametrize("mistake", SAME_MISTAKE)
def test_the_same_mistake_on_all_ranks_raises_once_without_ranks(mistake: str, worlds: Worlds) -> None:
    bad, words = SAME_MISTAKE[mistake]
    text, after = common_error(worlds, 2, bad, good)
    assert words in text
    assert text.startswith(mistake.split()[0])
    assert after == [[0.0, 1.0]] * 2


def by_rank(*values: Any) -> Any:
    """Rank 2 has the last of two values."""
    return values[dist.get_rank() == 2]


def differing(name: str, one: Any, other: Any, **named: tuple[Any, Any]) -> Callable[[], Tensor]:
    """A call with ones of some shape, or of some shape and dtype; rank 2 has the last of two values."""

    def run() -> Tensor:
        shape, *dtype = by_rank(one, other)
        return RUNS[name](
            torch.ones(shape, dtype=dtype[0] if dtype else None), **{k: by_rank(*v) for k, v in named.items()}
        )

    return run


DISAGREE: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {}
for name in RUNS:
    DISAGREE[f"{name} dtype"] = (
        differing(name, ((3, 2), torch.float32), ((3, 2), torch.int64)),
        ("disagree on the dtype", "rank 0 brought float32", "rank 2 brought int64"),
    )
    DISAGREE[f"{name} width"] = (
        differing(name, ((3, 2),), ((3, 4),)),
        ("disagree on the width", "rank 0 brought", "rank 2 brought"),
    )
for name in ("all_reduce", "reduce", "broadcast", "reduce_scatter"):
    DISAGREE[f"{name} rows"] = differing(name, ((3, 2),), ((6, 2),)), ("disagree", "rank 0", "rank 2")
for name, setting, values, words in (
    ("all_reduce", "op", ("sum", "max"), ("disagree on op", "sum", "max")),
    ("all_reduce", "op", ("sum", "prod"), ("rank 2", "'prod'")),
    ("broadcast", "src", (0, 1), ("disagree on src", "has 0", "has 1")),
    ("gather", "dst", (0, 9), ("rank 2: rank 9 is not one",)),
    ("reduce_scatter", "op", ("sum", "mean"), ("disagree on op", "sum", "mean")),
    ("reduce_scatter", "shards", (Shards((1, 1, 1)), Shards((3, 0, 0))), ("disagree on", "[1, 1, 1]", "[3, 0, 0]")),
    ("all_gather", "gradient", ("partial", "complete"), ("disagree on gradient", "partial", "complete")),
):
    DISAGREE[f"{name} {setting} {values[1]}"] = differing(name, ((3,),), ((3,),), **{setting: values}), words


@pytest.mark.parametrize("mistake", DISAGREE)
def test_ranks_that_disagree_raise_the_same_error(mistake: str, worlds: Worlds) -> None:
    bad, words = DISAGREE[mistake]
    text, after = common_error(worlds, 3, bad, good)
    assert all(word in text for word in words), text
    assert after == [[0.0, 1.0, 2.0]] * 3
