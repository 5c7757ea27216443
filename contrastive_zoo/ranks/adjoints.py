"""The collectives as autograd functions: each forward pass and its adjoint."""

from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from contrastive_zoo.ranks.compiling import Function
from contrastive_zoo.ranks.transport import (
    OPS,
    Reduction,
    as_bytes,
    broadcast_in_place,
    exchange_rows,
    from_bytes,
    gather_rows,
    reduce_scatter_rows,
    reduced,
    reduced_everywhere,
    unpacked,
)
from contrastive_zoo.ranks.world import Shards, World

Gradient = Literal["partial", "complete"]


class AllReduce(Function):
    """y_r = Σ_s x_s on every rank r;  dx_s = Σ_r dy_r."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, op: Reduction, gradient: Gradient, world: World) -> Tensor:
        ctx.op, ctx.gradient, ctx.world = op, gradient, world
        y = reduced_everywhere(x, op, world)
        if op in ("max", "min"):
            ctx.save_for_backward(extreme_shares(x, y, world))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradient == "partial":
            dy = AllReduce.apply(dy, "sum", "partial", ctx.world)
        else:  # every rank holds the same complete dy
            dy = Replicated.apply(dy, ctx.world)
        return _to_sources(dy, ctx), None, None, None


class Reduce(Function):
    """y_dst = Σ_s x_s, zero elsewhere;  dx_s = dy_dst."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dst: int, op: Reduction, world: World) -> Tensor:
        ctx.dst, ctx.op, ctx.world = dst, op, world

        def run(wide: Tensor) -> None:
            background = wide.device.type == "cpu"
            where: dict[str, Any] = {"group": world.group, "group_dst": dst, "async_op": background}
            world.start("a reduction to one rank", lambda: dist.reduce(wide, op=OPS[op], **where), polled=background)()

        y = reduced(x, op, world, run)
        if world.rank != dst:
            y = torch.zeros_like(y)  # torch leaves a partial sum in it
        if op in ("max", "min"):
            extreme = Broadcast.apply(y, dst, world)
            ctx.save_for_backward(extreme_shares(x, extreme, world))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _to_sources(Broadcast.apply(dy, ctx.dst, ctx.world), ctx), None, None, None


class Broadcast(Function):
    """y_r = x_src on every rank r;  dx_src = Σ_r dy_r, zero elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, src: int, world: World) -> Tensor:
        ctx.src, ctx.world = src, world
        y = as_bytes(x.detach().reshape(1, *x.shape)).clone()
        broadcast_in_place(y, src, world)
        return from_bytes(y, x.reshape(1, *x.shape)).reshape(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return Reduce.apply(dy, ctx.src, "sum", ctx.world), None, None


class AllGather(Function):
    """Y_r = [x_0; …; x_{W−1}] on every rank r;  dx_s = Σ_r (slice s of dY_r)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shards: Shards, gradient: Gradient, world: World) -> Tensor:
        ctx.shards, ctx.gradient, ctx.world = shards, gradient, world
        return gather_rows(rows.detach(), shards, world)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradient == "complete":
            return _OwnSlice.apply(dy, ctx.shards, ctx.world), None, None, None
        return ReduceScatter.apply(dy, ctx.shards, ctx.world), None, None, None


class _Gathered(Function):
    """y = the gathered x of all ranks, from which every rank computes the same L;  dx = factor · this rank's slice of dy."""

    @staticmethod
    def forward(
        ctx: Any, shards: Sequence[Shards], world: World, factor: int, found: Sequence[Tensor], *rows: Tensor
    ) -> Any:
        ctx.shards, ctx.world, ctx.factor = shards, world, factor
        ctx.mark_non_differentiable(*(x for x in found if not x.is_floating_point()))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.factor != 1:
            refuse_second_derivative()
        # a slice is differentiated again only under create_graph; a node for each costs more than a small slice
        if torch.is_grad_enabled():
            local = [_OwnSlice.apply(dy, shards, ctx.world) for dy, shards in zip(dys, ctx.shards, strict=True)]
        else:
            local = [dy[shards.local] for dy, shards in zip(dys, ctx.shards, strict=True)]
        return None, None, None, None, *(ctx.factor * dx for dx in local)


def gather_together(
    rows: Sequence[Tensor], shards: Sequence[Shards], world: World, payload: Tensor | None = None, *, factor: int = 1
) -> list[Tensor]:
    """Gather several tensors at once, each as :func:`all_gather` with ``gradient="complete"`` does.

    Tensors with equal shard sizes share a message. If :func:`packed` rows were the handshake's payload, there is none.

    Args:
        rows: this rank's tensors.
        shards: the shard sizes of each of them.
        world: the ranks.
        payload: [W, bytes], the :func:`packed` rows of every rank; None if they were not sent.
        factor: multiplies the gradient of this rank's rows.

    Examples:
        >>> gather_together([torch.ones(1, 2), torch.tensor([7])], [Shards((1,))] * 2, World())
        [tensor([[1., 1.]]), tensor([7])]
    """
    if world.size == 1:
        return list(rows)
    if payload is not None:
        return list(_Gathered.apply(shards, world, factor, unpacked(payload, rows, shards), *rows))
    result: list[Tensor | None] = [None] * len(rows)
    for split in dict.fromkeys(shards):
        indices = [index for index, x in enumerate(shards) if x == split]
        parts = [as_bytes(rows[index].detach()) for index in indices]
        gathered = gather_rows(torch.cat(parts, 1), split, world).split([x.shape[1] for x in parts], 1)
        for index, part in zip(indices, gathered, strict=True):
            result[index] = from_bytes(part.clone(memory_format=torch.contiguous_format), rows[index])
    return list(_Gathered.apply(shards, world, factor, result, *rows))


class _OwnSlice(Function):
    """y_r = slice r of X, which every rank holds;  dX = [dy_0; …; dy_{W−1}] on every rank."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shards: Shards, world: World) -> Tensor:
        ctx.shards, ctx.world = shards, world
        return rows[shards.local]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return AllGather.apply(dy, ctx.shards, "complete", ctx.world), None, None


class ReduceScatter(Function):
    """y_r = Σ_s (slice r of X_s) / over;  dX_s = [dy_0; …; dy_{W−1}] / over."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shards: Shards, world: World, over: int = 1) -> Tensor:
        ctx.shards, ctx.world, ctx.over = shards, world, over
        return reduce_scatter_rows(rows.detach(), shards, world, over=over)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx = AllGather.apply(dy, ctx.shards, "partial", ctx.world)
        return dx if ctx.over == 1 else dx / ctx.over, None, None, None


class Gather(Function):
    """Y_dst = [x_0; …; x_{W−1}], no rows elsewhere;  dx_s = slice s of dY_dst."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, dst: int, shards: Shards, world: World) -> Tensor:
        ctx.dst, ctx.shards, ctx.world = dst, shards, world
        send = [shards.size if rank == dst else 0 for rank in range(world.size)]
        receive = shards.sizes if world.rank == dst else [0] * world.size
        return exchange_rows(rows.detach(), send, receive, world)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return Scatter.apply(dy, ctx.dst, ctx.shards, ctx.world), None, None, None


class Scatter(Function):
    """y_r = slice r of X_src;  dX_src = [dy_0; …; dy_{W−1}], zero elsewhere."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, src: int, shards: Shards, world: World) -> Tensor:
        ctx.src, ctx.shards, ctx.world, ctx.count = src, shards, world, len(rows)
        send = shards.sizes if world.rank == src else [0] * world.size
        receive = [shards.size if rank == src else 0 for rank in range(world.size)]
        return exchange_rows(rows.detach()[: sum(send)], send, receive, world)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx = Gather.apply(dy, ctx.src, ctx.shards, ctx.world)
        if ctx.world.rank != ctx.src:
            dx = torch.cat([dx, dx.new_zeros(ctx.count, *dx.shape[1:])])  # rows that only declared the width
        return dx, None, None, None


class Replicated(Function):
    """y_r = x, the same on every rank;  dx = Σ_r dy_r on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, world: World) -> Tensor:
        ctx.world = world
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return AllReduce.apply(dy, "sum", "complete", ctx.world), None


def extreme_shares(x: Tensor, extreme: Tensor, world: World) -> Tensor:
    """Return this rank's share in an elementwise extreme: 1 if it alone holds it, 1/k if k ranks tie, 0 otherwise."""
    holds = (x.detach() == extreme).to(x.dtype if x.is_floating_point() else torch.float32)
    return holds / reduced_everywhere(holds, "sum", world)


def _to_sources(dy: Tensor, ctx: Any) -> Tensor:
    """Return this rank's part of the gradient: divided for a mean, multiplied by its share for an extreme."""
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
        refuse_second_derivative()
        return dy * ctx.factor, None


def refuse_second_derivative() -> None:
    """Refuse a graph of gradients that are scaled for a trainer.

    Raises:
        ValueError: the backward pass runs under ``create_graph=True``.

    Examples:
        >>> with torch.no_grad():
        ...     refuse_second_derivative()
    """
    if torch.is_grad_enabled():
        raise ValueError(
            "DistributedLoss: create_graph=True asks for gradients that are differentiated again, but here they are those "
            "that a trainer averages, W times the derivative: a penalty of them would be W² times too large. Take the "
            "derivative of the bare loss under plain_formulas(), loss(embeddings, labels, world=cz.World.of()), or of a "
            "third-party loss of the rows that cz.collectives.all_gather(embeddings, gradient='complete') returns; add "
            "the penalty of this rank's rows to the value of DistributedLoss."
        )


def scale_gradient(x: Any, factor: float) -> Any:
    """Return x with its gradient multiplied by ``factor``; anything without a gradient unchanged.

    Raises:
        ValueError: x is a dataclass, which is not searched for tensors.
    """
    if is_dataclass(x):
        raise ValueError(
            f"DistributedLoss: gradients cannot be scaled inside a {type(x).__name__}. Let the loss take and return "
            "tensors, or tuples, lists and dicts of them."
        )
    return _ScaleGradient.apply(x, factor) if isinstance(x, Tensor) and x.requires_grad and factor != 1 else x
