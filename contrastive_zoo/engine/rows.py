"""Any loss that is a sum over anchors, from a function that says what one panel of anchors loses.

The function sees the panel's similarities to all N rows of all ranks, and which of them are positive and negative; it
is plain torch. Panels are c × N, so memory is linear in N. The outer sum is linear, hence its gradient can be taken
panel by panel already in the forward pass, and only divided by the global count afterwards:

    dS, dφ = ∂(Σ valid losses of the panel) / ∂(S, φ)
    dq    += dS Z          my rows as anchors
    dZ    += dSᵀ q         my anchors' pull on everybody's rows, summed back to their owners
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from contrastive_zoo.collectives import add_up_rows, all_gather, gather_rows, replicated, sum_over_ranks
from contrastive_zoo.engine.evaluation import is_dense, once, panels, without_autocast
from contrastive_zoo.engine.reduction import Reduction, reduce_anchors
from contrastive_zoo.masks import panel_masks
from contrastive_zoo.world import Shards, World

Rows = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(similarity, positive, negative) of c anchors × N columns to (loss [c], whether it counts [c])."""


@without_autocast
def sum_over_anchors(
    loss: nn.Module,
    z: Float[Tensor, "n d"],
    ids: Int[Tensor, " n"],
    *,
    reduction: Reduction = "mean",
    shards: Shards,
    world: World,
) -> Float[Tensor, "..."]:
    """What ``loss.rows`` says of every anchor, reduced over the valid ones of all ranks.

    Equal to ``reduce(*loss.rows(z @ Z.T, positive, negative))`` with Z the rows of all ranks.

    Args:
        loss: a module whose method ``rows(similarity, positive, negative)`` returns a loss and a validity per anchor.
            Its parameters get their complete gradient on every rank.
        z: my rows, anchors and candidates at once.
        ids: rows with equal ids are positives of each other.
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for my rows' losses.
        shards: where everybody's rows are.
        world: who holds them.

    Example:
        >>> class Nearest(nn.Module):
        ...     def rows(self, similarity, positive, negative):
        ...         return similarity.masked_fill(~negative, -9.0).amax(1), negative.any(1)
        >>> from contrastive_zoo.world import ALONE
        >>> sum_over_anchors(Nearest(), torch.eye(2), torch.arange(2), shards=Shards((2,)), world=ALONE)
        tensor(0.)
    """
    names, parameters = _parameters(loss)
    if is_dense():
        everybody = all_gather(z, shards=shards, process_group=world)
        masks = panel_masks(ids, gather_rows(ids, shards, world), shards.start)
        shared = {name: replicated(x, process_group=world) for name, x in zip(names, parameters, strict=True)}
        losses, valid = torch.func.functional_call(
            _CallRows(loss), shared, (z @ everybody.T, masks.positive, masks.negative)
        )
        return reduce_anchors(losses, valid, reduction=reduction, world=world)
    return _SumOverAnchors.apply(loss.rows, reduction, shards, world, ids, z, *parameters)


class _CallRows(nn.Module):
    """``loss.rows`` as a forward, so that functional_call can lend it other parameters."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, *panel: Tensor) -> tuple[Tensor, Tensor]:
        rows: Rows = self.loss.rows  # type: ignore[assignment]  # nn.Module types its attributes as tensors
        return rows(*panel)


def _parameters(loss: nn.Module) -> tuple[list[str], list[Tensor]]:
    learnable = {f"loss.{name}": x for name, x in loss.named_parameters() if x.requires_grad}
    return list(learnable), list(learnable.values())


class _SumOverAnchors(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        rows: Rows,
        reduction: Reduction,
        shards: Shards,
        world: World,
        ids: Tensor,
        z: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        sweep = _Sweep(rows, z, gather_rows(z, shards, world), ids, gather_rows(ids, shards, world), shards, world)
        ctx.reduction, ctx.world, ctx.sweep = reduction, world, sweep
        ctx.save_for_backward(z, *parameters)
        if reduction == "none":  # each anchor's weight is known in the backward pass only
            return sweep.losses()[0]
        if any(ctx.needs_input_grad):
            losses, valid, *ctx.gradients = sweep.gradients(parameters)
        else:
            losses, valid = sweep.losses()
        count = torch.stack([losses.sum().double(), valid.sum().double()])
        total, count = sum_over_ranks(count, gradient="complete", world=world).unbind()
        ctx.count = count.clamp(min=1) if reduction == "mean" else torch.ones_like(count)
        return (total / ctx.count).to(z.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        if ctx.reduction == "none":
            with torch.no_grad():
                gradients = ctx.sweep.gradients(inputs[1:], weights=grad_output)[2:]
        else:
            weight = (grad_output / ctx.count).to(grad_output.dtype)
            gradients = [weight * gradient for gradient in ctx.gradients]
        return *[None] * 5, *(once(gradient, *inputs) for gradient in gradients)


class _Sweep:
    """One pass over my anchors, panel by panel."""

    def __init__(
        self,
        rows: Rows,
        z: Tensor,
        everybody: Tensor,
        ids: Tensor,
        all_ids: Tensor,
        shards: Shards,
        world: World,
    ) -> None:
        self.rows, self.z, self.everybody, self.ids, self.all_ids = rows, z, everybody, ids, all_ids
        self.shards, self.world = shards, world

    def _panel(self, panel: slice, *, differentiable: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Similarities of a panel, and what the row function makes of them."""
        s = self.z[panel] @ self.everybody.T
        masks = panel_masks(self.ids[panel], self.all_ids, self.shards.start + panel.start)
        with torch.set_grad_enabled(differentiable):
            losses, valid = self.rows(s.requires_grad_(differentiable), masks.positive, masks.negative)
            return s, losses.where(valid, 0), valid

    def _panels(self) -> list[slice]:
        # the row function makes several matrices out of a panel, so that it gets a fraction of the budget
        return list(panels(len(self.z), 4 * len(self.everybody), self.z.dtype))

    def losses(self) -> tuple[Tensor, Tensor]:
        """Loss and validity of my anchors."""
        found = [self._panel(panel, differentiable=False)[1:] for panel in self._panels()]
        return self._joined([losses for losses, _ in found]), self._joined([valid for _, valid in found]).bool()

    @without_autocast
    def gradients(self, parameters: Sequence[Tensor], weights: Tensor | None = None) -> list[Tensor]:
        """Loss and validity of my anchors, then the gradient of their weighted sum by z and by the parameters."""
        dz, dall = torch.zeros_like(self.z), torch.zeros_like(self.everybody)
        dparameters = [torch.zeros_like(parameter) for parameter in parameters]
        losses, valid = [], []
        for panel in self._panels():
            s, of_panel, counts = self._panel(panel, differentiable=True)
            losses.append(of_panel.detach())
            valid.append(counts)
            if not of_panel.requires_grad:
                continue
            weight = torch.ones_like(of_panel) if weights is None else weights[panel].to(of_panel.dtype)
            found = torch.autograd.grad(of_panel, (s, *parameters), weight, allow_unused=True, materialize_grads=True)
            ds, *of_parameters = found
            torch.mm(ds, self.everybody, out=dz[panel])
            dall.addmm_(ds.T, self.z[panel])
            for total, part in zip(dparameters, of_parameters, strict=True):
                total.add_(part)
        dz += add_up_rows(dall, self.shards, self.world)
        dparameters = [sum_over_ranks(x, gradient="partial", world=self.world) for x in dparameters]
        return [self._joined(losses), self._joined(valid).bool(), dz, *dparameters]

    def _joined(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts) if parts else self.z.new_zeros(0)
