"""The public collectives with their checks, and sums without checks for ranks that have agreed already."""

from collections.abc import Sequence

import torch  # noqa: F401 - the examples use it
from torch import Tensor

from contrastive_zoo.collectives.adjoints import (
    AllGather,
    AllReduce,
    Broadcast,
    Gather,
    Gradient,
    Reduce,
    ReduceScatter,
    Replicated,
    Scatter,
)
from contrastive_zoo.collectives.checks import NO_ROWS, agree, agree_on_rows, sent_problem
from contrastive_zoo.collectives.transport import Reduction, reduced_everywhere
from contrastive_zoo.compiling import uncompiled
from contrastive_zoo.row_checks import described, tensor_problem
from contrastive_zoo.session import refuse
from contrastive_zoo.world import Processes, Shards, World


def mean_over_ranks(x: Tensor, world: World) -> Tensor:
    """Return the mean of all ranks' x without gradient, checks or handshake; the division has at least 32 bits.

    Examples:
        >>> mean_over_ranks(torch.tensor(2.0), World())
        tensor(2.)
    """
    return x if world.size == 1 else reduced_everywhere(x, "mean", world)


def sum_over_ranks(x: Tensor, *, gradient: Gradient, world: World) -> Tensor:
    """Return the sum of all ranks' x, as :func:`all_reduce` does, without checks or handshake.

    Examples:
        >>> sum_over_ranks(torch.tensor(2.0), gradient="complete", world=World())
        tensor(2.)
    """
    return x if world.size == 1 else AllReduce.apply(x, "sum", gradient, world)


@uncompiled
def all_reduce(
    x: Tensor, op: Reduction = "sum", *, gradient: Gradient = "partial", process_group: Processes = None
) -> Tensor:
    """Reduce x elementwise over all ranks; every rank gets the result.

    Args:
        x: the same shape and dtype on every rank. 16-bit numbers are summed in 32 bits.
        op: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``; equal extremes share the gradient equally.
        gradient: ``"partial"`` if each rank computes its own part of L from the result (gradients are summed),
            ``"complete"`` if every rank computes the same L from it (they are not).
        process_group: the ranks; None is the default group at the time of the call.

    Raises:
        ValueError: unknown ``op`` or ``gradient``, or ranks that disagree on shape or dtype.

    Examples:
        >>> all_reduce(torch.tensor([1.0, 2.0]))   # one process: nothing to add
        tensor([1., 2.])
    """
    world = World.of(process_group, "all_reduce")
    agree("all_reduce", x, world, op=op, gradient=gradient)
    x = _averageable(x, op)
    return x if world.size == 1 else AllReduce.apply(x, op, gradient, world)


@uncompiled
def reduce(x: Tensor, dst: int = 0, op: Reduction = "sum", *, process_group: Processes = None) -> Tensor:
    """Reduce x elementwise over all ranks to rank ``dst``; the other ranks get zeros.

    The adjoint is a broadcast from ``dst``, so every rank must run backward through its result: a loss on ``dst``, and
    ``result.sum()``, which is zero, on the other ranks. The gradients of those zeros are not read.

    Args:
        x: the same shape and dtype on every rank.
        dst: rank within the group.
        op: as for :func:`all_reduce`.
        process_group: the ranks.

    Raises:
        ValueError: unknown ``op``, a ``dst`` outside the group, or ranks that disagree on shape or dtype.

    Examples:
        >>> reduce(torch.tensor([1.0, 2.0]), op="mean")
        tensor([1., 2.])
    """
    world = World.of(process_group, "reduce")
    agree("reduce", x, world, op=op, dst=dst)
    x = _averageable(x, op)
    return x if world.size == 1 else Reduce.apply(x, dst, op, world)


def _averageable(x: Tensor, op: Reduction) -> Tensor:
    """Return x; integers and booleans as floating-point numbers if ``op`` is the mean."""
    return x / 1 if op == "mean" and not x.is_floating_point() else x


@uncompiled
def broadcast(x: Tensor, src: int = 0, *, process_group: Processes = None) -> Tensor:
    """Return rank ``src``'s x on every rank; its gradient is the sum over ranks, the other ranks' x get zeros.

    Args:
        x: the same shape and dtype on every rank; only the values of ``src`` are read. Any dtype.
        src: rank within the group.
        process_group: the ranks.

    Raises:
        ValueError: a ``src`` outside the group, or ranks that disagree on shape or dtype.

    Examples:
        >>> broadcast(torch.tensor(7))
        tensor(7)
    """
    world = World.of(process_group, "broadcast")
    agree("broadcast", x, world, src=src)
    return x if world.size == 1 else Broadcast.apply(x, src, world)


@uncompiled
def all_gather(
    rows: Tensor, *, gradient: Gradient = "partial", shards: Shards | None = None, process_group: Processes = None
) -> Tensor:
    """Return all ranks' rows in rank order; ranks may hold different numbers of rows, including zero.

    The adjoint is a reduce-scatter: the gradient of this rank's rows is the sum of their gradients over ranks.

    Args:
        rows: [n, …], same trailing shape and dtype on every rank. Any dtype.
        gradient: ``"partial"`` if each rank computes its own part of L from the rows (gradients are summed),
            ``"complete"`` if every rank computes the same L from them (each takes its own slice, without a message).
        shards: the shard sizes if all ranks know them; then there is no handshake and no check.
        process_group: the ranks.

    Returns:
        [Σ n, …].

    Raises:
        ValueError: unknown ``gradient``, or ranks that disagree on trailing shape or dtype.

    Examples:
        >>> all_gather(torch.tensor([[True], [False]])).tolist()
        [[True], [False]]
    """
    world = World.of(process_group, "all_gather")
    if shards is None:
        shards = agree_on_rows("all_gather", rows, world, gradient=gradient)
    return rows if world.size == 1 else AllGather.apply(rows, shards, gradient, world)


@uncompiled
def reduce_scatter(
    rows: Tensor, *, shards: Shards | None = None, op: Reduction = "sum", process_group: Processes = None
) -> Tensor:
    """Return this rank's slice of the sum of all ranks' [N, …]. The adjoint is an all-gather.

    Args:
        rows: [N, …], the same shape and dtype on every rank.
        shards: the slice of each rank; None splits the rows as evenly as ``torch.tensor_split``.
        op: ``"sum"`` or ``"mean"``.
        process_group: the ranks.

    Returns:
        [n, …], this rank's slice.

    Raises:
        ValueError: another ``op``, shards that do not add up to N, or ranks that disagree on shape or dtype.

    Examples:
        >>> reduce_scatter(torch.ones(2, 1)).tolist()
        [[1.0], [1.0]]
    """
    world = World.of(process_group, "reduce_scatter")
    if wrong := sent_problem(rows):
        refuse("reduce_scatter", wrong, world=world)
    total = len(rows) if rows.ndim else 0
    if shards is None:
        shards = Shards(_even(total, world.size), world.rank)
    problem = None
    if not (isinstance(op, str) and op in ("sum", "mean")):
        problem = f"op is 'sum' or 'mean', got {op!r}."
    elif shards.total != total:
        problem = f"shards {list(shards.sizes)} hold {shards.total} rows, got {total}."
    if rows.ndim == 0:
        problem = NO_ROWS
    agree("reduce_scatter", rows, world, problem=problem, op=op, sizes=list(shards.sizes))
    rows = _averageable(rows, op)
    return rows if world.size == 1 else ReduceScatter.apply(rows, shards, world, world.size if op == "mean" else 1)


@uncompiled
def gather(rows: Tensor, dst: int = 0, *, process_group: Processes = None) -> Tensor:
    """Return all ranks' rows in rank order on rank ``dst``, and [0, …] elsewhere. The adjoint is a scatter from ``dst``.

    Every rank must run backward through its result; on the other ranks through ``result.sum()``, which is zero.

    Args:
        rows: [n, …], same trailing shape and dtype on every rank; n may differ.
        dst: rank within the group.
        process_group: the ranks.

    Raises:
        ValueError: a ``dst`` outside the group, or ranks that disagree on trailing shape or dtype.

    Examples:
        >>> gather(torch.tensor([1, 2]))
        tensor([1, 2])
    """
    world = World.of(process_group, "gather")
    shards = agree_on_rows("gather", rows, world, dst=dst)
    return rows if world.size == 1 else Gather.apply(rows, dst, shards, world)


@uncompiled
def scatter(
    rows: Tensor, sizes: Sequence[int] | None = None, *, src: int = 0, process_group: Processes = None
) -> Tensor:
    """Split rank ``src``'s rows over the ranks, the first ``sizes[0]`` to rank 0 and so on. The adjoint is a gather.

    Args:
        rows: on ``src`` [Σ sizes, …]; elsewhere any number of rows, also 0, of the same trailing shape and dtype.
        sizes: one number per rank, read on ``src``; None splits the rows as evenly as ``torch.tensor_split``.
        src: rank within the group.
        process_group: the ranks.

    Returns:
        [sizes[rank], …].

    Raises:
        ValueError: a ``src`` outside the group, sizes that do not fit, or ranks that disagree on shape or dtype.

    Examples:
        >>> scatter(torch.tensor([1, 2, 3])).tolist()
        [1, 2, 3]
    """
    world = World.of(process_group, "scatter")
    if wrong := sent_problem(rows):
        refuse("scatter", wrong, world=world)
    total = len(rows) if rows.ndim else 0
    if not (sizes is None or (isinstance(sizes, (list, tuple)) and all(isinstance(x, int) for x in sizes))):
        refuse("scatter", f"sizes are {world.size} integers, one per rank, got {described(sizes)}.", world=world)
    wanted = list(_even(total, world.size)) if sizes is None else list(sizes)
    problem = None
    if (
        isinstance(src, int)
        and world.rank == src
        and (len(wanted) != world.size or sum(wanted) != total or min(wanted) < 0)
    ):
        problem = f"sizes must be {world.size} numbers that add up to the {total} rows of rank {src}, got {wanted}."
    agree_on_rows("scatter", rows, world, problem=problem, src=src)
    padded = (wanted + [0] * world.size)[: world.size]
    shards = Shards(tuple(world.exchange(padded)[src]), world.rank)
    return rows if world.size == 1 else Scatter.apply(rows, src, shards, world)


@uncompiled
def replicated(x: Tensor, *, process_group: Processes = None) -> Tensor:
    """Return x, a parameter with the same value on every rank; its gradient is the sum over ranks.

    Each rank may then use the parameter for its own rows only, and still gets the complete gradient.

    Args:
        x: equal on every rank.
        process_group: the ranks.

    Raises:
        ValueError: x is no dense tensor that holds values. Only this rank raises: no message is sent.

    Examples:
        >>> t = torch.tensor(0.1, requires_grad=True)
        >>> replicated(t).backward(); t.grad
        tensor(1.)
    """
    world = World.of(process_group, "replicated")
    if problem := tensor_problem("x", x):
        raise ValueError(f"replicated: {problem}")
    return x if world.size == 1 else Replicated.apply(x, world)


def _even(total: int, parts: int) -> tuple[int, ...]:
    """Return the sizes into which ``torch.tensor_split`` splits."""
    return tuple(total // parts + (rank < total % parts) for rank in range(parts))
