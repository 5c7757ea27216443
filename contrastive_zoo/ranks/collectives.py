"""The collectives of torch.distributed as differentiable functions, each with its adjoint.

The ranks together compute one number L. If the forward pass copies, the backward pass sums; if it sums, it copies.
``gradient="complete"`` is for results from which every rank computes the same L, with the complete derivative. Every rank
runs the backward pass through its result, in the same order. A message of either pass raises a ``CommunicationError`` if
another rank failed, died or is late.
"""

import torch
from torch import Tensor

from contrastive_zoo.ranks import adjoints
from contrastive_zoo.ranks.adjoints import Gradient
from contrastive_zoo.ranks.compat import unseen
from contrastive_zoo.ranks.compiling import uncompiled
from contrastive_zoo.ranks.row_checks import described, tensor_problem, word_problem
from contrastive_zoo.ranks.session import Session, agree
from contrastive_zoo.ranks.transport import SumOrMean
from contrastive_zoo.ranks.world import Processes, Shards, World

__all__ = ["all_gather", "all_reduce", "broadcast", "reduce_scatter", "replicated"]

NO_ROWS = "rows have at least one dimension, got a single number. Pass x.reshape(1)."


def _agree(
    name: str, x: Tensor, world: World, *, by_row: bool = False, problem: str | None = None, **settings: object
) -> Shards:
    """Check that shape, of a row if ``by_row``, dtype and settings are valid and equal; return how many rows ranks hold."""
    problem = word_problem("op", settings.get("op", "sum"), SumOrMean) or problem
    problem = word_problem("gradient", settings.get("gradient", "partial"), Gradient) or problem
    source = settings.get("src", 0)
    if not (isinstance(source, int) and 0 <= source < world.size):
        problem = f"rank {described(source)} is not one of the group's ranks 0 … {world.size - 1}."
    if by_row and isinstance(x, Tensor) and x.ndim == 0:
        problem = NO_ROWS
    # 8-bit floats, with which no loss computes, can be sent
    is_short_float = isinstance(x, Tensor) and x.is_floating_point() and x.dtype.itemsize == 1 and not x.is_meta
    problem = problem if is_short_float else tensor_problem("x", x) or problem
    unchecked = Session.of(world, check_finite=False)
    with unseen():
        rows = {} if problem is not None else {"x": x if by_row else x[None]}
        return agree(name, rows, world=unchecked, problem=problem, settings=settings).shards[0]


@uncompiled
def all_reduce(
    x: Tensor, op: SumOrMean = "sum", *, gradient: Gradient = "partial", process_group: Processes = None
) -> Tensor:
    """Return the sum or mean of all ranks' x, on every rank.

    Type: P → R, and P → I with ``gradient="complete"``.

    Args:
        x: the same shape and dtype on every rank. 8-bit and 16-bit numbers are summed in 32 bits.
        op: ``"sum"`` or ``"mean"``. For an extreme gather x, and take its ``amax(0)``.
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
    _agree("all_reduce", x, world, op=op, gradient=gradient)
    return adjoints.all_reduced(_averageable(x, op), op, gradient, world)


def _averageable(x: Tensor, op: SumOrMean) -> Tensor:
    """Return x; integers and booleans as floating-point numbers if ``op`` is the mean."""
    return x / 1 if op == "mean" and not (x.is_floating_point() or x.is_complex()) else x


@uncompiled
def broadcast(x: Tensor, src: int = 0, *, process_group: Processes = None) -> Tensor:
    """Return rank ``src``'s x on every rank; its gradient is the sum over ranks, the other ranks' x get zeros.

    Type: V → R.

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
    _agree("broadcast", x, world, src=src)
    return adjoints.broadcasted(x, src, world)


@uncompiled
def all_gather(
    rows: Tensor, *, gradient: Gradient = "partial", shards: Shards | None = None, process_group: Processes = None
) -> Tensor:
    """Return all ranks' rows in rank order, [Σ n, …]; ranks may hold different numbers of rows, including zero.

    Type: V → R, and V → I with ``gradient="complete"``. The adjoint is a reduce-scatter: the gradient of this rank's rows is
    the sum of their gradients over ranks.

    Args:
        rows: [n, …], same trailing shape and dtype on every rank. Any dtype.
        gradient: ``"partial"`` if each rank computes its own part of L from the rows (gradients are summed),
            ``"complete"`` if every rank computes the same L from them (each takes its own slice, without a message).
        shards: the shard sizes if all ranks know them; then there is no handshake and no check.
        process_group: the ranks.

    Raises:
        ValueError: unknown ``gradient``, or ranks that disagree on trailing shape or dtype.

    Examples:
        >>> all_gather(torch.tensor([[True], [False]])).tolist()
        [[True], [False]]
    """
    world = World.of(process_group, "all_gather")
    if shards is None:
        shards = _agree("all_gather", rows, world, by_row=True, gradient=gradient)
    return adjoints.all_gathered(rows, shards, gradient, world)


@uncompiled
def reduce_scatter(
    rows: Tensor, *, shards: Shards | None = None, op: SumOrMean = "sum", process_group: Processes = None
) -> Tensor:
    """Return this rank's slice, [n, …], of the sum of all ranks' [N, …].

    Type: P → V. The adjoint is an all-gather.

    Args:
        rows: [N, …], the same shape and dtype on every rank. 8-bit and 16-bit numbers are summed in 32 bits.
        shards: the slice of each rank; None splits the rows as evenly as ``torch.tensor_split``.
        op: ``"sum"`` or ``"mean"``.
        process_group: the ranks.

    Raises:
        ValueError: another ``op``, shards that do not add up to N, or ranks that disagree on shape or dtype.

    Examples:
        >>> reduce_scatter(torch.ones(2, 1)).tolist()
        [[1.0], [1.0]]
    """
    world = World.of(process_group, "reduce_scatter")
    total = len(rows) if isinstance(rows, Tensor) and rows.ndim else 0
    if shards is None:
        shards = Shards(tuple(len(x) for x in torch.arange(total).tensor_split(world.size)), world.rank)
    problem = NO_ROWS if isinstance(rows, Tensor) and rows.ndim == 0 else None
    if shards.total != total:
        problem = f"shards {list(shards.sizes)} hold {shards.total} rows, got {total}."
    _agree("reduce_scatter", rows, world, problem=problem, op=op, sizes=list(shards.sizes))
    return adjoints.reduce_scattered(_averageable(rows, op), shards, world, world.size if op == "mean" else 1)


@uncompiled
def replicated(x: Tensor, *, process_group: Processes = None) -> Tensor:
    """Return x, a parameter with the same value on every rank; its gradient is the sum over ranks.

    Type: I → R. Each rank may then use the parameter for its own rows only, and still gets the complete gradient.

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
    return adjoints.replicated(x, world)
