"""The collectives of torch.distributed as differentiable functions, each with its adjoint beside it.

What "gradient" means here. The ranks together compute one number L. A tensor that lives on several ranks is several
variables, one per rank, and each rank's gradient is the derivative of L by *its* variable. The adjoint of a collective
then follows from its matrix: where the forward pass copies, the backward pass sums, and where it sums, it copies.

| forward                  | backward (``gradient="partial"``) | backward (``gradient="complete"``) |
|--------------------------|-----------------------------------|------------------------------------|
| all_reduce(sum)          | all_reduce(sum)                   | the gradient itself                |
| all_reduce(mean)         | all_reduce(sum) / W               | the gradient itself / W            |
| all_reduce(max)          | all_reduce(sum), to the winners   | the gradient itself, to the winners|
| all_gather               | reduce_scatter(sum)               | my own slice                       |
| reduce(sum) to dst       | broadcast from dst                |                                    |
| broadcast from src       | reduce(sum) to src                |                                    |
| scatter from src         | gather to src                     |                                    |
| gather to dst            | scatter from dst                  |                                    |
| reduce_scatter(sum)      | all_gather                        |                                    |
| replicated (no movement) | all_reduce(sum)                   |                                    |

``gradient="complete"`` is for results from which every rank computes the *same* thing: each then holds the whole
derivative already, and summing W equal copies would count it W times.

Every rank must call the backward pass through what it got, in the same order, as it must the forward pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from contrastive_zoo._compat import reduce_scatter_single
from contrastive_zoo.compiling import Function, uncompiled
from contrastive_zoo.session import Session, meet
from contrastive_zoo.world import Processes, Shards, World

Reduction = Literal["sum", "mean", "max", "min"]
Gradient = Literal["partial", "complete"]

_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_ACROSS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sum": torch.sum,
    "mean": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
}


# --------------------------------------------------------------------------------------- moving bytes, no gradient


def _as_bytes(rows: Tensor) -> Tensor:
    """[n, …] of any dtype as [n, bytes of a row]: what every backend can move."""
    flat = rows.reshape(len(rows), rows.shape[1:].numel())
    if flat.stride() != (flat.shape[1], 1):  # is_contiguous() forgives odd strides of single rows and columns
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def _from_bytes(moved: Tensor, like: Tensor) -> Tensor:
    return moved.view(like.dtype).reshape(len(moved), *like.shape[1:])


def gather_rows(rows: Tensor, shards: Shards, world: World) -> Tensor:
    """The rows of all ranks in rank order; not to be written to where the session has a cache."""
    return start_gather(rows, shards, world)()


def start_gather(rows: Tensor, shards: Shards, world: World) -> Callable[[], Tensor]:
    """Start to gather the rows of all ranks; calling the result waits for them."""
    if world.size == 1:
        return lambda: rows
    cache = world.cache if isinstance(world, Session) else None
    if cache is None:
        return _started(rows, shards, world)
    return lambda: cache.gather(rows, shards, lambda x, of: _started(x, of, world)())


def _started(rows: Tensor, shards: Shards, world: World) -> Callable[[], Tensor]:
    mine = _as_bytes(rows)
    highest = max(shards.sizes)
    if len(mine) < highest:
        mine = torch.cat([mine, mine.new_zeros(highest - len(mine), mine.shape[1])])
    wait = world.start_gather(mine)

    def arrived() -> Tensor:
        parts = wait()
        if min(shards.sizes) == highest:
            return _from_bytes(parts.flatten(0, 1), rows)
        return _from_bytes(torch.cat([x[:size] for x, size in zip(parts, shards.sizes, strict=True)]), rows)

    return arrived


def derived(function: Callable[..., Tensor], *rows: Tensor, world: World) -> Tensor:
    """``function(*rows)``, as many rows as all of ``rows`` together, whose own rows must be of equal number.

    Each rank can repeat it on rows of another, so that a session with a cache need not gather the result.

    Examples:
        >>> derived(lambda x: x[:, :1], torch.tensor([[1, 2], [3, 4]]), world=World()).tolist()
        [[1], [3]]
    """
    cache = world.cache if isinstance(world, Session) else None
    return function(*rows) if cache is None else cache.derive(function, *rows)


def scatters_sums(shards: Shards, world: World) -> bool:
    """Whether :func:`add_up_rows` is the backend's own reduce-scatter."""
    return world.on_accelerators and len(set(shards.sizes)) == 1


def add_up_rows(rows: Tensor, shards: Shards, world: World, *, over: int = 1) -> Tensor:
    """My slice of the sum of everybody's [N, …], divided by ``over`` in at least 32 bits: a mean fits where a sum does not.

    A reduce-scatter where the backend has one of its own and slices are even, as NCCL does: it needs no room for what
    every rank sends. Otherwise an all-to-all and a local sum in rank order: the same bytes, for uneven slices too, and
    half of what gloo's reduce-scatter moves, which is an all-reduce underneath.
    """
    if world.size == 1:
        return rows
    wide = torch.float32 if rows.dtype in (torch.float16, torch.bfloat16) else rows.dtype
    if scatters_sums(shards, world):
        everybody = rows.to(wide).contiguous()
        mine = everybody.new_empty(shards.size, *rows.shape[1:])
        reduce_scatter_single(mine, everybody, group=world.group)
        return (mine if over == 1 else mine / over).to(rows.dtype)
    parts = exchange_rows(rows, shards.sizes, [shards.size] * world.size, world)
    parts = parts.view(world.size, shards.size, *rows.shape[1:])
    total = parts.sum(0, dtype=wide)
    return (total if over == 1 else total / over).to(rows.dtype)


def extreme_over_ranks(x: Tensor, op: Literal["max", "min"], world: World) -> Tensor:
    """Elementwise extreme, without gradient."""
    return x if world.size == 1 else _reduced_everywhere(x, op, world)


def exchange_rows(rows: Tensor, send: Sequence[int], receive: Sequence[int], world: World) -> Tensor:
    """``send[r]`` of my rows to rank r, ``receive[r]`` rows from it, both in rank order."""
    mine = _as_bytes(rows)
    got = mine.new_empty(sum(receive), mine.shape[1])
    dist.all_to_all_single(got, mine, list(receive), list(send), group=world.group)
    return _from_bytes(got, rows)


def _reduced(x: Tensor, op: Reduction, world: World, run: Callable[[Tensor], Any]) -> Tensor:
    """``run`` on a copy of x, 16-bit numbers summed in 32."""
    wide = x.detach().to(torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype, copy=True)
    wide = wide.contiguous()
    run(wide)
    if op == "mean":
        wide = wide / world.size
    return wide.to(x.dtype) if x.is_floating_point() else wide


def _reduced_everywhere(x: Tensor, op: Reduction, world: World) -> Tensor:
    """An all-reduce; what is small is gathered and reduced in rank order, so that every rank has the same bits."""

    def run(y: Tensor) -> None:
        if world.sends_directly(y):
            y.copy_(_ACROSS[op](world.start_gather(y)(), 0))
        else:
            dist.all_reduce(y, _OPS[op], world.group)

    return _reduced(x, op, world, run)


# ------------------------------------------------------------------------------------------- forward and its adjoint


class _AllReduce(Function):
    """y_r = Σ_s x_s on every rank r;  dx_s = Σ_r dy_r."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, op: Reduction, gradient: Gradient, world: World) -> Tensor:
        ctx.op, ctx.gradient, ctx.world = op, gradient, world
        y = _reduced_everywhere(x, op, world)
        if op in ("max", "min"):
            ctx.save_for_backward(_winners(x, y, world))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradient == "partial":
            dy = _AllReduce.apply(dy, "sum", "partial", ctx.world)
        else:  # every rank holds the same dy, and goes on with it for its own x
            dy = _Replicated.apply(dy, ctx.world)
        return _to_sources(dy, ctx), None, None, None


class _Reduce(Function):
    """y_dst = Σ_s x_s, zero elsewhere;  dx_s = dy_dst."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dst: int, op: Reduction, world: World) -> Tensor:
        ctx.dst, ctx.op, ctx.world = dst, op, world
        y = _reduced(x, op, world, lambda wide: dist.reduce(wide, op=_OPS[op], group=world.group, group_dst=dst))
        if world.rank != dst:
            y = torch.zeros_like(y)  # torch leaves a half-finished sum here
        if op in ("max", "min"):
            best = _Broadcast.apply(y, dst, world)
            ctx.save_for_backward(_winners(x, best, world))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _to_sources(_Broadcast.apply(dy, ctx.dst, ctx.world), ctx), None, None, None


class _Broadcast(Function):
    """y_r = x_src on every rank r;  dx_src = Σ_r dy_r, zero elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, src: int, world: World) -> Tensor:
        ctx.src, ctx.world = src, world
        y = _as_bytes(x.detach().reshape(1, *x.shape)).clone()
        dist.broadcast(y, group=world.group, group_src=src)
        return _from_bytes(y, x.reshape(1, *x.shape)).reshape(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _Reduce.apply(dy, ctx.src, "sum", ctx.world), None, None


class _AllGather(Function):
    """Y_r = [x_0; …; x_{W−1}] on every rank r;  dx_s = Σ_r (slice s of dY_r)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shards: Shards, gradient: Gradient, world: World) -> Tensor:
        ctx.shards, ctx.gradient, ctx.world = shards, gradient, world
        return gather_rows(rows.detach(), shards, world)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradient == "complete":
            return _OwnSlice.apply(dy, ctx.shards, ctx.world), None, None, None
        return _ReduceScatter.apply(dy, ctx.shards, ctx.world), None, None, None


class _Gathered(Function):
    """y = the gathered x of all ranks, from which every rank computes the same;  dx = factor · this rank's slice of dy."""

    @staticmethod
    def forward(
        ctx: Any, shards: Sequence[Shards], world: World, factor: int, found: Sequence[Tensor], *rows: Tensor
    ) -> Any:
        ctx.shards, ctx.world, ctx.factor = shards, world, factor
        ctx.mark_non_differentiable(*(x for x in found if not x.is_floating_point()))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        mine = (ctx.factor * _OwnSlice.apply(dy, shards, ctx.world) for dy, shards in zip(dys, ctx.shards, strict=True))
        return None, None, None, None, *mine


def gather_together(
    rows: Sequence[Tensor], shards: Sequence[Shards], world: World, payload: Tensor | None = None, *, factor: int = 1
) -> list[Tensor]:
    """:func:`all_gather` with ``gradient="complete"`` of several tensors whose splits are known.

    Tensors with equal splits share a message; there is none if :func:`packed` rows were the handshake's payload.

    Args:
        rows: of this rank.
        shards: the split of each of them.
        world: the processes.
        payload: [W, bytes], what :func:`packed` made of the same rows on every rank; None if it was not sent.
        factor: what the gradient of this rank's rows is multiplied by.

    Examples:
        >>> gather_together([torch.ones(1, 2), torch.tensor([7])], [Shards((1,))] * 2, World())
        [tensor([[1., 1.]]), tensor([7])]
    """
    if world.size == 1:
        return list(rows)
    if payload is not None:
        return list(_Gathered.apply(shards, world, factor, _unpacked(payload, rows, shards), *rows))
    found: list[Tensor | None] = [None] * len(rows)
    for alike in dict.fromkeys(shards):
        which = [index for index, x in enumerate(shards) if x == alike]
        parts = [_as_bytes(rows[index].detach()) for index in which]
        gathered = gather_rows(torch.cat(parts, 1), alike, world).split([x.shape[1] for x in parts], 1)
        for index, part in zip(which, gathered, strict=True):
            found[index] = _from_bytes(part.clone(memory_format=torch.contiguous_format), rows[index])
    return list(_Gathered.apply(shards, world, factor, found, *rows))


def packed(rows: Sequence[Tensor]) -> list[Tensor]:
    """Rows as the bytes of a handshake's payload.

    Examples:
        >>> packed([torch.tensor([[1], [2]], dtype=torch.uint8)])
        [tensor([1, 2], dtype=torch.uint8)]
    """
    return [_as_bytes(x.detach()).flatten() for x in rows]


def _unpacked(payload: Tensor, rows: Sequence[Tensor], shards: Sequence[Shards]) -> list[Tensor]:
    widths = [x.shape[1:].numel() * x.dtype.itemsize for x in rows]
    found: list[list[Tensor]] = [[] for _ in rows]
    for rank, of_rank in enumerate(payload):
        sizes = [width * of.sizes[rank] for width, of in zip(widths, shards, strict=True)]
        for index, part in enumerate(of_rank[: sum(sizes)].split(sizes)):
            found[index].append(part.view(shards[index].sizes[rank], widths[index]))
    # joined bytes begin where memory does, as a wider dtype asks for
    return [_from_bytes(torch.cat(parts), x) for parts, x in zip(found, rows, strict=True)]


class _OwnSlice(Function):
    """y_r = slice r of X, which every rank holds;  dX = [dy_0; …; dy_{W−1}] on every rank."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shards: Shards, world: World) -> Tensor:
        ctx.shards, ctx.world = shards, world
        return rows[shards.mine]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _AllGather.apply(dy, ctx.shards, "complete", ctx.world), None, None


class _ReduceScatter(Function):
    """y_r = Σ_s (slice r of X_s) / over;  dX_s = [dy_0; …; dy_{W−1}] / over."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shards: Shards, world: World, over: int = 1) -> Tensor:
        ctx.shards, ctx.world, ctx.over = shards, world, over
        return add_up_rows(rows.detach(), shards, world, over=over)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx = _AllGather.apply(dy, ctx.shards, "partial", ctx.world)
        return dx if ctx.over == 1 else dx / ctx.over, None, None, None


class _Gather(Function):
    """Y_dst = [x_0; …; x_{W−1}], no rows elsewhere;  dx_s = slice s of dY_dst."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, dst: int, shards: Shards, world: World) -> Tensor:
        ctx.dst, ctx.shards, ctx.world = dst, shards, world
        send = [shards.size if rank == dst else 0 for rank in range(world.size)]
        receive = shards.sizes if world.rank == dst else [0] * world.size
        return exchange_rows(rows.detach(), send, receive, world)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _Scatter.apply(dy, ctx.dst, ctx.shards, ctx.world), None, None, None


class _Scatter(Function):
    """y_r = slice r of X_src;  dX_src = [dy_0; …; dy_{W−1}], zero elsewhere."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, src: int, shards: Shards, world: World) -> Tensor:
        ctx.src, ctx.shards, ctx.world, ctx.count = src, shards, world, len(rows)
        send = shards.sizes if world.rank == src else [0] * world.size
        receive = [shards.size if rank == src else 0 for rank in range(world.size)]
        return exchange_rows(rows.detach()[: sum(send)], send, receive, world)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx = _Gather.apply(dy, ctx.src, ctx.shards, ctx.world)
        if ctx.world.rank != ctx.src:
            dx = torch.cat([dx, dx.new_zeros(ctx.count, *dx.shape[1:])])  # what was brought for its width alone
        return dx, None, None, None


class _Replicated(Function):
    """y_r = x, which every rank holds already;  dx = Σ_r dy_r on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, world: World) -> Tensor:
        ctx.world = world
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _AllReduce.apply(dy, "sum", "complete", ctx.world), None


def _winners(x: Tensor, best: Tensor, world: World) -> Tensor:
    """Each rank's share in a maximum: 1 where it alone holds it, 1/k among k that tie, 0 elsewhere."""
    won = (x.detach() == best).to(x.dtype if x.is_floating_point() else torch.float32)
    return won / _reduced_everywhere(won, "sum", world)


def _to_sources(dy: Tensor, ctx: Any) -> Tensor:
    if ctx.op == "mean":
        return dy / ctx.world.size
    return dy * ctx.saved_tensors[0] if ctx.op in ("max", "min") else dy


class _ScaleGradient(Function):
    """y = x;  dx = factor · dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy * ctx.factor, None


def scale_gradient(x: Any, factor: float) -> Any:
    """x itself, whose gradient comes out ``factor`` times as large; anything without a gradient as it is.

    Raises:
        ValueError: x is a dataclass, into which nobody looks for tensors.
    """
    if is_dataclass(x):
        raise ValueError(
            f"DistributedLoss: gradients cannot be scaled inside a {type(x).__name__}. Let the loss take and return "
            "tensors, or tuples, lists and dicts of them."
        )
    return _ScaleGradient.apply(x, factor) if isinstance(x, Tensor) and x.requires_grad and factor != 1 else x


# ----------------------------------------------------------------------------------------------------- public names


def mean_over_ranks(x: Tensor, world: World) -> Tensor:
    """The mean of all ranks' x, without gradient, for those who have met already; divided in at least 32 bits.

    Example:
        >>> mean_over_ranks(torch.tensor(2.0), World())
        tensor(2.)
    """
    return x if world.size == 1 else _reduced_everywhere(x, "mean", world)


def sum_over_ranks(x: Tensor, *, gradient: Gradient, world: World) -> Tensor:
    """:func:`all_reduce` for those who have met already: no checks, no message but its own.

    Example:
        >>> sum_over_ranks(torch.tensor(2.0), gradient="complete", world=World())
        tensor(2.)
    """
    return x if world.size == 1 else _AllReduce.apply(x, "sum", gradient, world)


@uncompiled
def all_reduce(
    x: Tensor, op: Reduction = "sum", *, gradient: Gradient = "partial", process_group: Processes = None
) -> Tensor:
    """Reduce x elementwise over all ranks; every rank gets the result.

    Args:
        x: the same shape and dtype on every rank. 16-bit numbers are summed in 32 bits.
        op: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``; of equal extremes each gets an equal share of the gradient.
        gradient: ``"partial"`` if each rank goes on to compute its own part of L from the result (gradients are
            summed), ``"complete"`` if all compute the same from it (they are not).
        process_group: whose ranks; None is the default group at the time of the call.

    Raises:
        ValueError: unknown ``op`` or ``gradient``, or ranks that disagree on shape or dtype.

    Example:
        >>> all_reduce(torch.tensor([1.0, 2.0]))   # one process: nothing to add
        tensor([1., 2.])
    """
    world = World.of(process_group)
    _agree("all_reduce", x, world, op=op, gradient=gradient)
    x = _averageable(x, op)
    return x if world.size == 1 else _AllReduce.apply(x, op, gradient, world)


@uncompiled
def reduce(x: Tensor, dst: int = 0, op: Reduction = "sum", *, process_group: Processes = None) -> Tensor:
    """Reduce x elementwise over all ranks to rank ``dst``; the others get zeros.

    The adjoint is a broadcast from ``dst``, so every rank must run backward through its result: a loss on ``dst`` and
    ``result.sum()``, which is zero, elsewhere. The gradients of those zeros are not read.

    Args:
        x: the same shape and dtype on every rank.
        dst: rank within the group.
        op: as for :func:`all_reduce`.
        process_group: whose ranks.

    Raises:
        ValueError: unknown ``op``, a ``dst`` outside the group, or ranks that disagree on shape or dtype.

    Example:
        >>> reduce(torch.tensor([1.0, 2.0]), op="mean")
        tensor([1., 2.])
    """
    world = World.of(process_group)
    _agree("reduce", x, world, op=op, dst=dst)
    x = _averageable(x, op)
    return x if world.size == 1 else _Reduce.apply(x, dst, op, world)


def _averageable(x: Tensor, op: Reduction) -> Tensor:
    """x, as fractions if they are whole numbers (or truths) to be averaged."""
    return x / 1 if op == "mean" and not x.is_floating_point() else x


@uncompiled
def broadcast(x: Tensor, src: int = 0, *, process_group: Processes = None) -> Tensor:
    """Everybody gets rank ``src``'s x; its gradient is the sum of everybody's, the other ranks' x get zeros.

    Args:
        x: the same shape and dtype on every rank; values count on ``src`` alone. Any dtype.
        src: rank within the group.
        process_group: whose ranks.

    Raises:
        ValueError: a ``src`` outside the group, or ranks that disagree on shape or dtype.

    Example:
        >>> broadcast(torch.tensor(7))
        tensor(7)
    """
    world = World.of(process_group)
    _agree("broadcast", x, world, src=src)
    return x if world.size == 1 else _Broadcast.apply(x, src, world)


@uncompiled
def all_gather(
    rows: Tensor, *, gradient: Gradient = "partial", shards: Shards | None = None, process_group: Processes = None
) -> Tensor:
    """All ranks' rows, in rank order; each rank may bring another number of them, also none.

    The adjoint is a reduce-scatter: my rows' gradient is the sum over ranks of what each of them sent back.

    Args:
        rows: [n, …], same trailing shape and dtype on every rank. Any dtype.
        gradient: ``"partial"`` if each rank goes on to compute its own part of L from the rows (gradients are summed),
            ``"complete"`` if every rank computes the same L from them (each keeps its own slice, nothing travels).
        shards: everybody's sizes if already known; spares their exchange, and the checks.
        process_group: whose ranks.

    Returns:
        [Σ n, …].

    Raises:
        ValueError: unknown ``gradient``, or ranks that disagree on trailing shape or dtype.

    Example:
        >>> all_gather(torch.tensor([[True], [False]])).tolist()
        [[True], [False]]
    """
    world = World.of(process_group)
    if shards is None:
        shards = _agree_on_rows("all_gather", rows, world, gradient=gradient)
    return rows if world.size == 1 else _AllGather.apply(rows, shards, gradient, world)


@uncompiled
def reduce_scatter(
    rows: Tensor, *, shards: Shards | None = None, op: Reduction = "sum", process_group: Processes = None
) -> Tensor:
    """Sum everybody's [N, …] and keep my slice of it. The adjoint is an all-gather.

    Args:
        rows: [N, …], the same shape and dtype on every rank.
        shards: which rows belong to whom; None splits them as evenly as ``torch.tensor_split``.
        op: ``"sum"`` or ``"mean"``.
        process_group: whose ranks.

    Returns:
        [n, …], this rank's slice.

    Raises:
        ValueError: another ``op``, shards that do not add up to N, or ranks that disagree on shape or dtype.

    Example:
        >>> reduce_scatter(torch.ones(2, 1)).tolist()
        [[1.0], [1.0]]
    """
    world = World.of(process_group)
    total = len(rows) if rows.ndim else 0
    if shards is None:
        shards = Shards(_even(total, world.size), world.rank)
    problem = None
    if op not in ("sum", "mean"):
        problem = f"op is 'sum' or 'mean', got {op!r}."
    elif shards.total != total:
        problem = f"shards {list(shards.sizes)} hold {shards.total} rows, got {total}."
    if rows.ndim == 0:
        problem = _NO_ROWS
    _agree("reduce_scatter", rows, world, problem=problem, op=op, sizes=list(shards.sizes))
    rows = _averageable(rows, op)
    return rows if world.size == 1 else _ReduceScatter.apply(rows, shards, world, world.size if op == "mean" else 1)


@uncompiled
def gather(rows: Tensor, dst: int = 0, *, process_group: Processes = None) -> Tensor:
    """All ranks' rows, in rank order, on rank ``dst``; the others get [0, …]. The adjoint is a scatter from ``dst``.

    Every rank must run backward through its result: ``result.sum()``, a sum of nothing, where it is empty.

    Args:
        rows: [n, …], same trailing shape and dtype on every rank; n may differ.
        dst: rank within the group.
        process_group: whose ranks.

    Raises:
        ValueError: a ``dst`` outside the group, or ranks that disagree on trailing shape or dtype.

    Example:
        >>> gather(torch.tensor([1, 2]))
        tensor([1, 2])
    """
    world = World.of(process_group)
    shards = _agree_on_rows("gather", rows, world, dst=dst)
    return rows if world.size == 1 else _Gather.apply(rows, dst, shards, world)


@uncompiled
def scatter(
    rows: Tensor, sizes: Sequence[int] | None = None, *, src: int = 0, process_group: Processes = None
) -> Tensor:
    """Rank ``src`` deals out its rows, the first ``sizes[0]`` to rank 0 and so on. The adjoint is a gather to ``src``.

    Args:
        rows: on ``src`` [Σ sizes, …]; elsewhere any number of rows, none will do, of the same trailing shape and dtype.
        sizes: one number a rank, read on ``src``; None splits the rows as evenly as ``torch.tensor_split``.
        src: rank within the group.
        process_group: whose ranks.

    Returns:
        [sizes[rank], …].

    Raises:
        ValueError: a ``src`` outside the group, sizes that do not fit, or ranks that disagree on shape or dtype.

    Example:
        >>> scatter(torch.tensor([1, 2, 3])).tolist()
        [1, 2, 3]
    """
    world = World.of(process_group)
    total = len(rows) if rows.ndim else 0
    deal = list(_even(total, world.size)) if sizes is None else list(sizes)
    problem = None
    if world.rank == src and (len(deal) != world.size or sum(deal) != total or min(deal) < 0):
        problem = f"sizes must be {world.size} numbers that add up to the {total} rows of rank {src}, got {deal}."
    _agree_on_rows("scatter", rows, world, problem=problem, src=src)
    padded = (deal + [0] * world.size)[: world.size]
    shards = Shards(tuple(world.exchange(padded)[src]), world.rank)
    return rows if world.size == 1 else _Scatter.apply(rows, src, shards, world)


@uncompiled
def replicated(x: Tensor, *, process_group: Processes = None) -> Tensor:
    """x, a parameter of which every rank holds the same copy; its gradient is the sum of what all ranks find.

    With it each rank may use the parameter for its own rows only, and still gets the complete gradient.

    Args:
        x: equal on every rank.
        process_group: whose ranks.

    Example:
        >>> t = torch.tensor(0.1, requires_grad=True)
        >>> replicated(t).backward(); t.grad
        tensor(1.)
    """
    world = World.of(process_group)
    return x if world.size == 1 else _Replicated.apply(x, world)


_NO_ROWS = "rows have at least one dimension, got a single number. Pass x.reshape(1)."


def _agree(name: str, x: Tensor, world: World, *, problem: str | None = None, **settings: object) -> None:
    """Every rank brings the same shape, dtype and settings, and the settings are known ones."""
    _agree_on_rows(name, x.reshape(1, *x.shape), world, problem=problem, **settings)


def _agree_on_rows(name: str, rows: Tensor, world: World, *, problem: str | None = None, **settings: object) -> Shards:
    if "op" in settings and settings["op"] not in _OPS:
        problem = f"op is one of {', '.join(_OPS)}, got {settings['op']!r}."
    if "gradient" in settings and settings["gradient"] not in ("partial", "complete"):
        problem = f"gradient is 'partial' or 'complete', got {settings['gradient']!r}."
    root = settings.get("src", settings.get("dst", 0))
    if not (isinstance(root, int) and 0 <= root < world.size):
        problem = f"rank {root} is not one of the group's ranks 0 … {world.size - 1}."
    if rows.ndim == 0:
        problem = _NO_ROWS
    tolerant = Session.of(world, check_finite=False)
    return meet(name, {"x": rows}, world=tolerant, problem=problem, settings=settings)[0]


def _even(total: int, parts: int) -> tuple[int, ...]:
    """As ``torch.tensor_split`` splits."""
    return tuple(total // parts + (rank < total % parts) for rank in range(parts))
