"""Reduce the losses of all ranks' anchors: a mean is the global sum over the global count."""

from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from contrastive_zoo.collectives import sum_over_ranks
from contrastive_zoo.devices import sum_dtype
from contrastive_zoo.engine.dense_mode import is_small_batch
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
    """Return Σ losses / Σ valid over all ranks' anchors (``"mean"``), the sum (``"sum"``), or local losses (``"none"``).

    An anchor that is not valid does not count and gets no gradient. Without a valid anchor the result is a zero that is
    connected to the graph, so that every rank takes part in the collectives of the backward pass. ``valid`` may also
    count the pairs of an anchor whose loss is a sum over pairs: the mean is then one over pairs. A count may be tiny,
    to add the anchor's loss to the sum only; a mean over such anchors alone is 0. Columns are separate terms: the
    result is the sum of their means.

    Args:
        losses: losses of the local anchors.
        valid: whether an anchor counts, or how many times; None counts each once.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        world: the ranks that hold anchors.

    Examples:
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
    if valid is None and world.size == 1 and reduction == "mean" and is_small_batch(len(losses)):
        return losses.mean() if losses.ndim == 1 else losses.mean(0).sum()
    total = losses.sum(0, dtype=sum_dtype(losses))
    count = torch.full_like(total, len(losses)) if valid is None else valid.sum(0, dtype=sum_dtype(losses))
    total = torch.stack([total, count])
    # every rank derives the same value from the sum, so the gradient on each rank is already complete
    total, count = sum_over_ranks(total, gradient="complete", world=world).unbind()
    return (total if reduction == "sum" else total / mean_divisor(count.detach())).sum().to(losses.dtype)


def mean_divisor(count: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """Return the divisor of a mean: the count, at least 1, or infinity if nothing counts.

    Examples:
        >>> mean_divisor(torch.tensor([3.0, 0.0, 1e-38]))
        tensor([3., inf, inf])
    """
    return count.clamp(min=1).where(count > _NEGLIGIBLE_COUNT, torch.inf)


_NEGLIGIBLE_COUNT = 2.0**-100
"""Total count of 2²⁶ anchors that each count 2⁻¹²⁶ times, float32's smallest normal number."""
