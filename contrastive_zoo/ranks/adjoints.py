"""The collectives as autograd functions: each forward pass and its adjoint."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from contrastive_zoo.ranks.compiling import Function
from contrastive_zoo.ranks.devices import DIFFERENTIABLE, on_cpu
from contrastive_zoo.ranks.transport import (
    SumOrMean,
    as_bytes,
    broadcast_in_place,
    from_bytes,
    gather_rows,
    reduce_scatter_rows,
    reduced_everywhere,
    unpacked,
)
from contrastive_zoo.ranks.world import Shards, World

Gradient = Literal["partial", "complete"]
Map: TypeAlias = Callable[[Tensor], Tensor]


class _Linear(Function):
    """A linear map of all ranks' tensors; its backward pass is the adjoint map, which can be differentiated again.

    ``types`` are those of x and of the result over the ranks: R, I, V or P of spmd_types.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, types: str, run: Map, adjoint: Map, world: World) -> Tensor:
        ctx.adjoint, ctx.world = adjoint, world
        y = run(x)
        return y if y is x else y.detach()  # autograd refuses changes in place of a view that a function returns

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.adjoint(dy), None, None, None, None

    @staticmethod
    def spmd_typecheck(y: Tensor, *, x: Tensor, types: str, world: World) -> None:
        """Declare the types to the checker of spmd_types, which calls this and is thus installed."""
        import spmd_types

        before, after = ({world.process_group: getattr(spmd_types, name)} for name in types.split(" → "))
        spmd_types.assert_type(x, before)
        spmd_types.assert_local_type_like(y, x, after)


def _linear(x: Tensor, types: str, run: Map, adjoint: Map, world: World) -> Tensor:
    return x if world.size == 1 else _Linear.apply(x, types, run, adjoint, world)


def all_reduced(x: Tensor, op: SumOrMean, gradient: Gradient, world: World) -> Tensor:
    """y_r = Σ_s x_s on every rank r;  dx_s = Σ_r dy_r, or dy_s if every rank holds the same complete dy."""

    def adjoint(dy: Tensor) -> Tensor:
        dy = all_reduced(dy, "sum", "partial", world) if gradient == "partial" else replicated(dy, world)
        return dy if op == "sum" else dy / world.size

    types = "P → R" if gradient == "partial" else "P → I"
    return _linear(x, types, lambda x: reduced_everywhere(x, op, world), adjoint, world)


def _summed_at(x: Tensor, dst: int, world: World) -> Tensor:
    """y_dst = Σ_s x_s, zero elsewhere;  dx_s = dy_dst."""

    def run(x: Tensor) -> Tensor:
        y = reduced_everywhere(x.detach(), "sum", world)
        return y if world.rank == dst else torch.zeros_like(y)

    return _linear(x, "P → V", run, lambda dy: broadcasted(dy, dst, world), world)


def broadcasted(x: Tensor, src: int, world: World) -> Tensor:
    """y_r = x_src on every rank r;  dx_src = Σ_r dy_r, zero elsewhere."""

    def run(x: Tensor) -> Tensor:
        one = x.detach().reshape(1, *x.shape)
        y = as_bytes(one).clone()
        broadcast_in_place(y, src, world)
        return from_bytes(y, one).reshape(x.shape)

    return _linear(x, "V → R", run, lambda dy: _summed_at(dy, src, world), world)


def all_gathered(rows: Tensor, shards: Shards, gradient: Gradient, world: World) -> Tensor:
    """Y_r = [x_0; …; x_{W−1}] on every rank r;  dx_s = Σ_r (slice s of dY_r), or this rank's slice of a complete dY."""
    types, adjoint = ("V → I", _own_slice) if gradient == "complete" else ("V → R", reduce_scattered)

    def run(x: Tensor) -> Tensor:
        return gather_rows(x.detach(), shards, world)

    return _linear(rows, types, run, lambda dy: adjoint(dy, shards, world), world)


def _own_slice(rows: Tensor, shards: Shards, world: World) -> Tensor:
    """y_r = slice r of X, which every rank holds;  dX = [dy_0; …; dy_{W−1}] on every rank."""
    return _linear(
        rows, "I → V", lambda x: x[shards.local], lambda dy: all_gathered(dy, shards, "complete", world), world
    )


def reduce_scattered(rows: Tensor, shards: Shards, world: World, over: int = 1) -> Tensor:
    """y_r = Σ_s (slice r of X_s) / over;  dX_s = [dy_0; …; dy_{W−1}] / over."""

    def adjoint(dy: Tensor) -> Tensor:
        dx = all_gathered(dy, shards, "partial", world)
        return dx if over == 1 else dx / over

    return _linear(rows, "P → V", lambda x: reduce_scatter_rows(x.detach(), shards, world, over=over), adjoint, world)


def replicated(x: Tensor, world: World) -> Tensor:
    """y_r = x, the same on every rank;  dx = Σ_r dy_r on every rank."""
    return _linear(x, "I → R", lambda x: x, lambda dy: all_reduced(dy, "sum", "complete", world), world)


class _Gathered(Function):
    """y = the gathered x of all ranks, from which every rank computes the same L;  dx = W · this rank's slice of dy."""

    @staticmethod
    def forward(ctx: Any, shards: Sequence[Shards], world: World, results: Sequence[Tensor], *rows: Tensor) -> Any:
        ctx.shards, ctx.world = shards, world
        results = [x.detach() for x in results]  # no views, so that a loss may change them in place
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
        return x.detach()  # no view, so that a trainer may divide the loss in place

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
