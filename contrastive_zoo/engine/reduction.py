"""A mean is the global sum over the global count, never a mean of the ranks' means."""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from contrastive_zoo.collectives import sum_over_ranks
from contrastive_zoo.world import World

Reduction = Literal["mean", "sum", "none"]
REDUCTIONS = ("mean", "sum", "none")


def reduce_anchors(
    losses: Float[Tensor, " n"], valid: Bool[Tensor, " n"] | None = None, *, reduction: Reduction = "mean", world: World
) -> Float[Tensor, "..."]:
    """Σ losses / Σ valid over all ranks' anchors (``"mean"``), the sum alone (``"sum"``), or mine as they are.

    An anchor that is not valid counts nowhere and gets no gradient; without any the result is a zero that still hangs
    in the graph, so that no rank falls out of the collectives of the backward pass.

    Args:
        losses: this rank's anchors.
        valid: which of them count; None is all.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        world: whose anchors.

    Example:
        >>> from contrastive_zoo.world import ALONE
        >>> reduce_anchors(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]), world=ALONE)
        tensor(2.)
    """
    if valid is not None:
        losses = losses.where(valid, 0)
    if reduction == "none":
        return losses
    here = len(losses) if valid is None else valid.sum()
    total = torch.stack([losses.sum().double(), torch.as_tensor(here, dtype=torch.float64, device=losses.device)])
    # everybody goes on with the same sum, so everybody's gradient is already the whole one
    total, count = sum_over_ranks(total, gradient="complete", world=world).unbind()
    return (total if reduction == "sum" else total / count.detach().clamp(min=1)).to(losses.dtype)
