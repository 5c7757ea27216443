"""The collectives as autograd functions: each forward pass and its adjoint."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from contrastive_zoo.ranks.compiling import Function
from contrastive_zoo.ranks.devices import DIFFERENTIABLE, on_cpu
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
Map: TypeAlias = Callable[[Tensor], Tensor]


class _Linear(Function):
    """A linear map of all ranks' tensors; its backward pass is the adjoint map, which can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Map, adjoint: Map, world: World) -> Tensor:
        ctx.adjoint, ctx.world = adjoint, world
        return run(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.adjoint(dy), None, None, None


def _linear(x: Tensor, run: Map, adjoint: Map, world: World) -> Tensor:
    return x if world.size == 1 else _Linear.apply(x, run, adjoint, world)


def all_reduced(x: Tensor, op: Reduction, gradient: Gradient, world: World) -> Tensor:
    """y_r = Σ_s x_s on every rank r;  dx_s = Σ_r dy_r, or dy_s if every rank holds the same complete dy."""

    def adjoint(dy: Tensor) -> Tensor:
        dy = all_reduced(dy, "sum", "partial", world) if gradient == "partial" else replicated(dy, world)
        return _to_sources(dy, op, shares, world)

    y = _linear(x, lambda x: reduced_everywhere(x, op, world), adjoint, world)
    shares = extreme_shares(x, y, world) if op in ("max", "min") else None
    return y


def reduced_to(x: Tensor, dst: int, op: Reduction, world: World) -> Tensor:
    """y_dst = Σ_s x_s, zero elsewhere;  dx_s = dy_dst."""

    def start(wide: Tensor) -> None:
        begin = partial(dist.reduce, wide, op=OPS[op], group=world.group, group_dst=dst, async_op=wide.is_cpu)
        world.start("a reduction to one rank", begin, polled=wide.is_cpu)()

    def run(x: Tensor) -> Tensor:
        y = reduced(x, op, world, start)
        return y if world.rank == dst else torch.zeros_like(y)  # torch leaves a partial sum in it

    def adjoint(dy: Tensor) -> Tensor:
        return _to_sources(broadcasted(dy, dst, world), op, shares, world)

    y = _linear(x, run, adjoint, world)
    shares = extreme_shares(x, broadcasted(y.detach(), dst, world), world) if op in ("max", "min") else None
    return y


def broadcasted(x: Tensor, src: int, world: World) -> Tensor:
    """y_r = x_src on every rank r;  dx_src = Σ_r dy_r, zero elsewhere."""

    def run(x: Tensor) -> Tensor:
        one = x.detach().reshape(1, *x.shape)
        y = as_bytes(one).clone()
        broadcast_in_place(y, src, world)
        return from_bytes(y, one).reshape(x.shape)

    return _linear(x, run, lambda dy: reduced_to(dy, src, "sum", world), world)


def all_gathered(rows: Tensor, shards: Shards, gradient: Gradient, world: World) -> Tensor:
    """Y_r = [x_0; …; x_{W−1}] on every rank r;  dx_s = Σ_r (slice s of dY_r), or this rank's slice of a complete dY."""
    adjoint = _own_slice if gradient == "complete" else reduce_scattered
    return _linear(rows, lambda x: gather_rows(x.detach(), shards, world), lambda dy: adjoint(dy, shards, world), world)


def _own_slice(rows: Tensor, shards: Shards, world: World) -> Tensor:
    """y_r = slice r of X, which every rank holds;  dX = [dy_0; …; dy_{W−1}] on every rank."""
    return _linear(rows, lambda x: x[shards.local], lambda dy: all_gathered(dy, shards, "complete", world), world)


def reduce_scattered(rows: Tensor, shards: Shards, world: World, over: int = 1) -> Tensor:
    """y_r = Σ_s (slice r of X_s) / over;  dX_s = [dy_0; …; dy_{W−1}] / over."""

    def adjoint(dy: Tensor) -> Tensor:
        dx = all_gathered(dy, shards, "partial", world)
        return dx if over == 1 else dx / over

    return _linear(rows, lambda x: reduce_scatter_rows(x.detach(), shards, world, over=over), adjoint, world)


def gathered_to(rows: Tensor, dst: int, shards: Shards, world: World) -> Tensor:
    """Y_dst = [x_0; …; x_{W−1}], no rows elsewhere;  dx_s = slice s of dY_dst."""
    send = [shards.size if rank == dst else 0 for rank in range(world.size)]
    receive = shards.sizes if world.rank == dst else [0] * world.size
    run = partial(exchange_rows, send=send, receive=receive, world=world)
    return _linear(rows, run, lambda dy: scattered(dy, dst, shards, world), world)


def scattered(rows: Tensor, src: int, shards: Shards, world: World) -> Tensor:
    """y_r = slice r of X_src;  dX_src = [dy_0; …; dy_{W−1}], zero elsewhere."""
    send = shards.sizes if world.rank == src else [0] * world.size
    receive = [shards.size if rank == src else 0 for rank in range(world.size)]
    count = len(rows)

    def adjoint(dy: Tensor) -> Tensor:
        dx = gathered_to(dy, src, shards, world)
        # rows of other ranks than src only declare the width
        return dx if world.rank == src else torch.cat([dx, dx.new_zeros(count, *dx.shape[1:])])

    return _linear(rows, lambda x: exchange_rows(x.detach()[: sum(send)], send, receive, world), adjoint, world)


def replicated(x: Tensor, world: World) -> Tensor:
    """y_r = x, the same on every rank;  dx = Σ_r dy_r on every rank."""
    return _linear(x, lambda x: x.view_as(x), lambda dy: all_reduced(dy, "sum", "complete", world), world)


def extreme_shares(x: Tensor, extreme: Tensor, world: World) -> Tensor:
    """Return this rank's share in an elementwise extreme: 1 if it alone holds it, 1/k if k ranks tie, 0 otherwise."""
    holds = (x.detach() == extreme.detach()).to(x.dtype if x.is_floating_point() else torch.float32)
    return holds / reduced_everywhere(holds, "sum", world)


def _to_sources(dy: Tensor, op: Reduction, shares: Tensor | None, world: World) -> Tensor:
    """Return this rank's part of the gradient: divided for a mean, multiplied by its share for an extreme."""
    if op == "mean":
        return dy / world.size
    return dy if shares is None else dy * shares


class _Gathered(Function):
    """y = the gathered x of all ranks, from which every rank computes the same L;  dx = W · this rank's slice of dy."""

    @staticmethod
    def forward(ctx: Any, shards: Sequence[Shards], world: World, results: Sequence[Tensor], *rows: Tensor) -> Any:
        ctx.shards, ctx.world = shards, world
        ctx.mark_non_differentiable(*[x for x in results if x.dtype not in DIFFERENTIABLE])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ValueError(_DIFFERENTIATED_AGAIN)
        local = [ctx.world.size * dy[shards.local] for dy, shards in zip(dys, ctx.shards, strict=True)]
        return None, None, None, *local


def device_of(rows: Mapping[str, Tensor]) -> torch.device | None:
    """Return where the first embeddings are, or the first rows; None if there are none."""
    return next((x.device for x in sorted(rows.values(), key=lambda x: not x.is_floating_point())), None)


def gathered_rows(
    rows: Mapping[str, Tensor], shards: Sequence[Shards], payload: Tensor | None, world: World
) -> dict[str, Tensor]:
    """Return the tensors of all ranks in rank order, from the payloads if any, with gradients W times as large."""
    here, shards = [*rows.values()], shards[: len(rows)]
    if moves := world.on_accelerators or not all(map(on_cpu, here)):  # tensors of one message are on one device
        here = [x.to(world.device if world.on_accelerators else device_of(rows)) for x in here]
    result = [*here] if payload is None else unpacked(payload, here, shards)
    for split in dict.fromkeys(shards) if payload is None else ():  # equal ones share a message
        indices = [index for index, x in enumerate(shards) if x == split]
        parts = [as_bytes(here[index].detach()) for index in indices]
        gathered = gather_rows(torch.cat(parts, 1), split, world).split([x.shape[1] for x in parts], 1)
        for index, part in zip(indices, gathered, strict=True):
            result[index] = from_bytes(part.clone(memory_format=torch.contiguous_format), here[index])
    result = _Gathered.apply(shards, world, result, *here)
    if moves:
        result = [x.to(of.device) for x, of in zip(result, rows.values(), strict=True)]
    return dict(zip(rows, result, strict=True))


class _ScaleGradient(Function):
    """y = x;  dx = factor · dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            raise ValueError(_DIFFERENTIATED_AGAIN)
        return dy * ctx.factor, None


_DIFFERENTIATED_AGAIN = (
    "DistributedLoss: create_graph=True asks for gradients that are differentiated again, but here they are those that a "
    "trainer averages, W times the derivative: a penalty of them would be W² times too large. Take the derivative of the "
    "bare loss under plain_formulas(), loss(embeddings, labels, world=cz.World.of()), or of a third-party loss of the rows "
    "that cz.collectives.all_gather(embeddings, gradient='complete') returns; add the penalty of this rank's rows to the "
    "value of DistributedLoss."
)


def scale_gradient(x: Any, factor: float) -> Any:
    """Return x with its gradient multiplied by ``factor``; anything without a gradient unchanged."""
    if is_dataclass(x):
        raise ValueError(
            f"DistributedLoss: gradients cannot be scaled inside a {type(x).__name__}. Let the loss take and return "
            "tensors, or tuples, lists and dicts of them."
        )
    return _ScaleGradient.apply(x, factor) if isinstance(x, Tensor) and x.requires_grad and factor != 1 else x
