"""A mean is the global sum over the global count, never a mean of the ranks' means."""

from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from contrastive_zoo.collectives import sum_over_ranks
from contrastive_zoo.engine.dense_mode import few
from contrastive_zoo.world import World

Reduction = Literal["mean", "sum", "none"]
REDUCTIONS = ("mean", "sum", "none")


def reduce_anchors(
    losses: Float[Tensor, " n"] | Float[Tensor, "n k"],
    valid: Shaped[Tensor, " n"] | Shaped[Tensor, "n k"] | None = None,
    *,
    reduction: Reduction = "mean",
    world: World,
) -> Float[Tensor, "..."]:
    """Σ losses / Σ valid over all ranks' anchors (``"mean"``), the sum alone (``"sum"``), or mine as they are.

    An anchor that is not valid counts nowhere and gets no gradient; without any the result is a zero that still hangs
    in the graph, so that no rank falls out of the collectives of the backward pass. An anchor whose loss is a sum over
    pairs says how many: the mean is then one of pairs. It may count a vanishing number of times, to add its loss to the
    sum alone; a mean of such anchors only is 0. Columns are terms of their own: the sum of their means.

    Args:
        losses: this rank's anchors.
        valid: which of them count, or how many times; None is all, once.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        world: whose anchors.

    Example:
        >>> from contrastive_zoo.world import ALONE
        >>> reduce_anchors(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]), world=ALONE)
        tensor(2.)
        >>> reduce_anchors(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([1, 3, 0]), world=ALONE)   # 4 / 4
        tensor(1.)
    """
    if valid is not None:
        losses = losses.where(valid > 0, 0)
    if reduction == "none":
        return losses if losses.ndim == 1 else losses.sum(1)
    if valid is None and world.size == 1 and reduction == "mean" and few(len(losses)):
        return losses.mean() if losses.ndim == 1 else losses.mean(0).sum()
    total = losses.sum(0, dtype=torch.float64)
    count = torch.full_like(total, len(losses)) if valid is None else valid.sum(0, dtype=torch.float64)
    total = torch.stack([total, count])
    # everybody goes on with the same sum, so everybody's gradient is already the whole one
    total, count = sum_over_ranks(total, gradient="complete", world=world).unbind()
    return (total if reduction == "sum" else total / divisor(count.detach())).sum().to(losses.dtype)


def divisor(count: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """What sums are divided by to be means: the count, at least 1; infinity where nothing counts.

    Example:
        >>> divisor(torch.tensor([3.0, 0.0, 1e-38]))
        tensor([3., inf, inf])
    """
    return count.clamp(min=1).where(count > _VANISHING, torch.inf)


_VANISHING = 2.0**-100
"""2²⁶ anchors that count 2⁻¹²⁶ times, float32's smallest normal number, count so many times together."""
