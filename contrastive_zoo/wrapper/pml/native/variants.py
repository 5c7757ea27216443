"""This library's losses with pytorch-metric-learning's values where the formulas leave them open.

Each has the name of the public loss that it derives from, which errors and ``repr`` then show.
"""

import torch
from torch import Tensor

from contrastive_zoo.engine.row_statistics import AnyOf, Rows
from contrastive_zoo.losses import pair_margins, soft_margins, triplet
from contrastive_zoo.wrapper.pml.native.settings import SOFTPLUS_THRESHOLD


class Triplet(triplet.Triplet):
    """Mines the first of equally hard candidates, as BatchHardMiner does."""

    first_of_equals = True


class Circle(soft_margins.Circle):
    """The outer softplus is linear above :data:`SOFTPLUS_THRESHOLD`, as torch's is."""

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> Rows:
        losses, valid = yield from super().rows(similarity, positive, negative)
        linear = losses + torch.log1p(-torch.exp(-losses.clamp(min=1)))
        return linear.where(linear > SOFTPLUS_THRESHOLD, losses), valid


class RankedList(pair_margins.RankedList):
    """Leaves out pairs of equal embeddings, at distance 0."""

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> Rows:
        distinct = similarity > 0
        (valid,) = yield (AnyOf(positive.any(1) | negative.any(1)),)
        losses, _ = yield from super().rows(similarity, positive & distinct, negative & distinct)
        return losses, valid
