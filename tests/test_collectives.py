"""Every collective: values in any dtype, both derivatives as on one process, and adjoints that would be wrong."""

import itertools
import os
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple
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
from contrastive_zoo.ranks.compat import group_of_one, waiting_time
from contrastive_zoo.ranks.world import Shards, World
from contrastive_zoo.testing.batch import splits
from contrastive_zoo.testing.messages import Messages
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EXACT, assert_says, close, distance, error_message, groups, numbers

DTYPES = [torch.int64, torch.int32, torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHARDS = splits((1, 2, 3, 4), min_samples=0, max_per_rank=3)
ROOTS = st.integers(0, 3)


class At(NamedTuple):
    sizes: tuple[int, ...]
    root: int
    rank: int = 0
    group: Any = None

    @property
    def shards(self) -> Shards:
        return Shards(self.sizes, self.rank)


Run = Callable[[Tensor, At], Tensor]


class Collective(NamedTuple):
    run: Run
    expected: Callable[[list[Tensor], At], Sequence[Tensor]]  # computes every rank's result from all ranks' x
    brings_own: bool = False  # whether each rank brings its own rows; otherwise as many as all

    def rows(self, at: At) -> int:
        return at.sizes[at.rank] if self.brings_own else sum(at.sizes)


def reduced(op: str, xs: Sequence[Tensor]) -> Tensor:
    """In the dtype of the terms, which rounds once; of booleans, whether any is true."""
    stacked = torch.stack(list(xs))
    return (stacked.double().mean(0) if op == "mean" else stacked.double().sum(0)).to(stacked.dtype)


def reducing(op: str) -> dict[str, Collective]:
    return {
        f"all_reduce {op}": Collective(
            lambda x, at: cz.collectives.all_reduce(x, op, process_group=at.group),
            lambda xs, at: [reduced(op, xs)] * len(xs),
        ),
        f"reduce_scatter {op}": Collective(
            lambda x, at: cz.collectives.reduce_scatter(x, shards=at.shards, op=op, process_group=at.group),
            lambda xs, at: reduced(op, xs).split(list(at.sizes)),
        ),
    }


ALL = {
    **reducing("sum"),
    **reducing("mean"),
    "broadcast": Collective(
        lambda x, at: cz.collectives.broadcast(x, at.root % len(at.sizes), process_group=at.group),
        lambda xs, at: [xs[at.root % len(xs)]] * len(xs),
    ),
    "all_gather": Collective(
        lambda x, at: cz.collectives.all_gather(x, process_group=at.group),
        lambda xs, at: [torch.cat(xs)] * len(xs),
        brings_own=True,
    ),
}
by_name = pytest.mark.parametrize("name", ALL)


@by_name
@given(sizes=SHARDS, root=ROOTS, trailing=st.sampled_from([(), (3,), (2, 2)]), seed=st.integers(0, 99))
def test_values_are_right_in_every_dtype(name: str, sizes, root, trailing, seed, worlds: Worlds) -> None:
    collective = ALL[name]
    dtypes = [dtype for dtype in DTYPES if dtype.is_floating_point or not name.endswith("mean")]

    def brought(rank: int, dtype: torch.dtype) -> Tensor:
        return numbers(collective.rows(At(sizes, root, rank)), *trailing, seed=seed + rank, dtype=dtype)

    def job(directly_below: int) -> list[Tensor]:
        at = At(sizes, root, dist.get_rank())
        xs = [brought(at.rank, dtype) for dtype in dtypes]
        with warnings.catch_warnings(), patch.object(world_module, "SMALL_MESSAGE", directly_below):
            warnings.simplefilter("error")
            results = [collective.run(x, at) for x in xs]
        assert all(torch.equal(x, brought(at.rank, dtype)) for x, dtype in zip(xs, dtypes, strict=True)), "changed"
        return results

    for directly_below in (2**30, -1):  # every message goes to each other rank directly, or none does
        found = worlds.run(len(sizes), job, directly_below)
        for index, dtype in enumerate(dtypes):
            expected = collective.expected([brought(rank, dtype) for rank in range(len(sizes))], At(sizes, root))
            for rank, value in enumerate(expected):
                close(found[rank][index], value, 1e-6 if dtype == torch.float32 else 1e-12)


SUMS = [cz.collectives.all_reduce, cz.collectives.reduce_scatter]


def test_sums_and_means_of_every_dtype_are_those_of_one_process(worlds: Worlds) -> None:
    """Also of dtypes that no backend sums; a mean of integers has floats."""
    dtypes = torch.int64, torch.bool, torch.int16, torch.uint16, torch.uint32, torch.float8_e4m3fn, torch.complex32

    def job(directly_below: int) -> list[Any]:
        shards = Shards((2, 0)[: dist.get_world_size()], dist.get_rank())
        runs = cz.collectives.all_reduce, partial(cz.collectives.reduce_scatter, shards=shards)
        with patch.object(world_module, "SMALL_MESSAGE", directly_below):
            means = [run(torch.tensor([1, 0]).to(x), op="mean") for run in runs for x in dtypes]
            sums = [run(torch.tensor([dist.get_rank() == 0, 0]).to(x)) for run in runs for x in dtypes]
        return [(x.dtype, x.to(torch.complex64).tolist()) for x in means + sums]

    for directly_below in (2**30, -1):
        (alone,), (together, _) = (worlds.run(size, job, directly_below) for size in (1, 2))
        assert together == alone
        assert {dtype.is_floating_point or dtype.is_complex for dtype, _ in alone[: 2 * len(dtypes)]} == {True}


def test_16_bit_numbers_are_summed_in_32_bits(worlds: Worlds) -> None:
    # bfloat16 counts 256, 258, 260: 256 + 1 is 256 again, but 256 + 1 + 1 + 1 is 259 and rounds once, to 260
    def job() -> list[list[float]]:
        x = torch.ones(4, dtype=torch.bfloat16)
        x[dist.get_rank()] = 256
        sums = [run(x).tolist() for run in SUMS]
        dist.all_reduce(x)
        return [*sums, x.tolist()]

    for everywhere, scattered, naive in worlds.run(4, job):
        assert {*everywhere, *scattered} == {260.0} != {*naive}


def test_a_collective_is_one_message(worlds: Worlds) -> None:
    """After the handshake, which a known split saves."""

    def job() -> list[int]:
        counts, gather_known = [], partial(cz.collectives.all_gather, shards=Shards((3, 3), dist.get_rank()))
        mean = partial(cz.collectives.all_reduce, op="mean")
        for run in (cz.collectives.all_reduce, mean, cz.collectives.broadcast, cz.collectives.all_gather, gather_known):
            with Messages() as messages:
                run(torch.ones(3))
            counts.append(len(messages.sent))
        return counts

    assert worlds.run(2, job) == [[2, 2, 2, 2, 1]] * 2


def test_a_mean_where_the_backend_scatters_sums_itself(worlds: Worlds) -> None:
    """As NCCL does; here gloo's reduce-scatter stands in for it."""

    def job() -> list[list[float]]:
        with patch.object(transport, "scatters_sums", lambda shards, world: True):
            rows = torch.tensor([[1.0], [3.0]]) + 4 * dist.get_rank()
            return [cz.collectives.reduce_scatter(rows, op=op).flatten().tolist() for op in ("sum", "mean")]

    assert worlds.run(2, job) == [[[6.0], [3.0]], [[10.0], [5.0]]]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.T,
    "a column of a transposed one, which counts as contiguous": lambda x: x.T[:, :1],
    "one number for all": lambda x: x[:1, :1].expand(4, 4),
    "no rows, expanded": lambda x: x[0, 0].expand(0, 2),
}


def test_rows_may_have_any_strides(worlds: Worlds) -> None:
    def job() -> None:
        runs = *SUMS, cz.collectives.broadcast, cz.collectives.all_gather
        for run, (name, view) in itertools.product(runs, LAYOUTS.items()):
            x = view(numbers(4, 4, seed=dist.get_rank()))
            assert torch.equal(run(x), run(x.clone(memory_format=torch.contiguous_format))), (run.__name__, name)

    worlds.run(2, job)


def test_rows_are_split_as_tensor_split_does_unless_told(worlds: Worlds) -> None:
    found = worlds.run(3, lambda: (cz.collectives.reduce_scatter(torch.arange(5)) // 3).tolist())
    assert found == [part.tolist() for part in torch.arange(5).tensor_split(3)]


def partial_loss(value: Tensor, rank: int) -> Tensor:
    return (numbers(*value.shape, seed=40 + rank) * value**2).sum() + value.sin().sum()


def derivatives(parts: Sequence[Tensor], xs: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
    first = torch.autograd.grad(sum(parts), xs, create_graph=True, **options)
    again = sum((dx * weight).sum() for dx, weight in zip(first, weights, strict=True)) + 0 * sum(x.sum() for x in xs)
    return [*first, *torch.autograd.grad(again, xs, **options)]


def errors(worlds: Worlds, name: str, run: Run, sizes, root: int, seed: int, complete: bool = False) -> list[float]:
    ranks = range(len(sizes))

    def drawn(rank: int) -> list[Tensor]:
        shape = ALL[name].rows(At(sizes, root, rank)), 2
        x = torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(seed + rank)).double()
        return [x.requires_grad_(), numbers(*shape, seed=50 + rank)]

    def job() -> list[Tensor]:
        at = At(sizes, root, dist.get_rank())
        x, weight = drawn(at.rank)
        result = run(x * 1, at).mul_(1)  # which may be changed in place
        return derivatives([partial_loss(result, 0 if complete else at.rank)], [x], [weight])

    xs, weights = zip(*map(drawn, ranks), strict=True)
    outputs = ALL[name].expected(list(xs), At(sizes, root))[: 1 if complete else None]
    expected = derivatives([partial_loss(y, rank) for rank, y in enumerate(outputs)], xs, weights)
    found = [x for of_order in zip(*worlds.run(len(sizes), job), strict=True) for x in of_order]
    distances = [distance(*pair) for pair in zip(found, expected, strict=True)]
    return [max(distances[: len(sizes)]), max(distances[len(sizes) :])]


COMPLETE: dict[str, Run] = {
    "all_reduce sum": lambda x, at: cz.collectives.all_reduce(x, gradient="complete"),
    "all_reduce mean": lambda x, at: cz.collectives.all_reduce(x, "mean", gradient="complete"),
    "all_gather": lambda x, at: cz.collectives.all_gather(x, gradient="complete"),
}
"""Of results from which every rank computes the same."""


@pytest.mark.parametrize(("name", "complete"), [*((x, False) for x in ALL), *((x, True) for x in COMPLETE)])
@given(sizes=SHARDS, root=ROOTS, seed=st.integers(0, 99))
def test_derivatives_are_those_of_one_process(name: str, complete, sizes, root, seed, worlds: Worlds) -> None:
    run = COMPLETE[name] if complete else ALL[name].run
    assert max(errors(worlds, name, run, sizes, root, seed, complete)) <= EXACT


@by_name
def test_a_wrong_adjoint_is_detected(name: str, worlds: Worlds) -> None:
    """What people write: the gradient of this rank's own result, cut or padded."""

    def mutant(x: Tensor, at: At) -> Tensor:
        y, own = ALL[name].run(x, at).detach(), x
        if len(y) < len(x):
            own = x[at.shards.local]
        elif len(y) > len(x):
            own = torch.zeros_like(y).index_put((torch.arange(len(y))[at.shards.local],), x)
        return y + own - own.detach()

    assert errors(worlds, name, mutant, (2, 1, 3), 1, seed=0)[0] > 1e-3


GROUPS = [*((([1, 3], [0, 2]), sizes) for sizes in ((0, 1), (1, 0), (1, 1))), (([3, 1, 0], [2]), (2, 1, 0))]


@pytest.mark.parametrize(("of", "sizes"), GROUPS, ids=str)
def test_ranks_are_counted_within_a_group_while_another_group_works(of, sizes, worlds: Worlds) -> None:
    """The gradient of a sum is an expanded number, which counts as contiguous where a result has one number or none."""
    members = {process: sorted(ranks) for ranks in of for process in ranks}

    def at_of(process: int, group: Any = None) -> At:
        return At(sizes[: len(members[process])], 1, members[process].index(process), group)

    def brought(name: str, process: int) -> Tensor:
        return numbers(ALL[name].rows(at_of(process)), 1, seed=process).requires_grad_()

    def job() -> dict[str, list[Tensor]]:
        process, found = dist.get_rank(), {}
        with groups(*of) as group:
            for name in ALL:
                x = brought(name, process)
                y = ALL[name].run(x, at_of(process, group))
                found[name] = [y.detach(), *torch.autograd.grad(y.sum(), x)]
        return found

    by_process = worlds.run(4, job)
    for name in ALL:
        for ranks in map(sorted, of):
            xs = [brought(name, process) for process in ranks]
            expected = ALL[name].expected(xs, at_of(ranks[0]))
            total = sum(y.sum() for y in expected)
            gradients = torch.autograd.grad(total, xs, allow_unused=True, materialize_grads=True)
            for process, *pair in zip(ranks, expected, gradients, strict=True):
                for x, y in zip(by_process[process][name], pair, strict=True):
                    close(x, y.detach())


def test_a_device_mesh_of_one_dimension_names_a_group(worlds: Worlds) -> None:
    def job() -> tuple[list[list[int]], str | None]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        whole, x = init_device_mesh("cpu", (4,)), torch.tensor([dist.get_rank()])
        gather = partial(cz.collectives.all_gather, x)
        found = [gather(process_group=group).tolist() for group in (mesh["dp"], mesh["tp"], whole)]
        refusal = error_message(lambda: gather(process_group=mesh))
        dist.barrier()
        for group in mesh.get_all_groups():
            dist.destroy_process_group(group)
        return found, refusal

    for rank, (found, refusal) in enumerate(worlds.run(4, job)):
        assert found == [[rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1], [0, 1, 2, 3]]
        assert_says(refusal, "device mesh of 2 dimensions … mesh['dp']")


def test_a_process_outside_the_group_raises(worlds: Worlds) -> None:
    def job() -> str | None:
        group = dist.new_group([0, 2])
        text = error_message(lambda: cz.collectives.all_reduce(torch.ones(1), process_group=group))
        dist.barrier()
        if dist.get_rank() != 1:
            dist.destroy_process_group(group)
        return text

    inside, outside, also_inside = worlds.run(3, job)
    assert inside is also_inside is None
    assert_says(outside, "process 1 is not in the group")


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=4))
def test_texts_of_any_length_are_exchanged(texts: list[str], worlds: Worlds) -> None:
    found = worlds.run(len(texts), lambda text: World.of().exchange_text(text), each=[(text,) for text in texts])
    assert found == [texts] * len(texts)


@patch.object(World, "on_accelerators", True)
def of_host_groups() -> tuple[list[float], str]:
    """Return time-outs of one and of a group of one, and the error of another that has no network interface."""
    world = World.of(dist.new_group(timeout=timedelta(seconds=37)))
    seconds = [waiting_time(group) for group in (world._host_group, group_of_one(world.process_group))]
    world = World.of(dist.new_group(), "NTXent, call 1")
    with patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "nowhere0"}):
        return seconds, str(error_message(lambda: world.exchange([1]), cz.CommunicationError))


def test_groups_made_beside_the_users_have_its_time_out_and_an_error_names_the_variable_of_gloo() -> None:
    """In a pool of its own: in that of all tests the name of a group may be taken, and one that was not made keeps it."""
    with Worlds(timeout=300.0) as worlds:
        by_rank = worlds.run(2, of_host_groups)
    for rank, (seconds, found) in enumerate(by_rank):
        assert seconds == [37.0, 37.0]
        assert found.startswith(f"NTXent, call 1: rank {rank}: ranks that compute on accelerators agree through gloo")
        assert_says(found, "Set GLOO_SOCKET_IFNAME to a network interface … nowhere0")
