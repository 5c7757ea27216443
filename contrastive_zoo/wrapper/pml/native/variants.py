"""Variants of this library's losses that return pytorch-metric-learning's values where the formulas leave them open."""

from typing import TypeVar

import torch
from torch import Tensor

from contrastive_zoo.engine.row_statistics import AnyOf, Rows
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.losses.pair_margins import RankedList
from contrastive_zoo.losses.soft_margins import Circle
from contrastive_zoo.losses.triplet import Triplet
from contrastive_zoo.wrapper.pml.native.settings import SOFTPLUS_THRESHOLD

K = TypeVar("K", bound=type[Loss])


def named_as_its_base(cls: K) -> K:
    """Give a variant the name of the public loss that it derives from: errors and ``repr`` then name a loss users know."""
    cls.__name__ = cls.__bases__[0].__name__
    return cls


@named_as_its_base
class FirstHardestTriplet(Triplet):
    """Mines the first of equally hard candidates, as BatchHardMiner does."""

    first_of_equals = True


@named_as_its_base
class CircleWithThreshold(Circle):
    """The outer softplus is linear above :data:`SOFTPLUS_THRESHOLD`, as torch's is."""

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> Rows:
        losses, valid = yield from super().rows(similarity, positive, negative)
        linear = losses + torch.log1p(-torch.exp(-losses.clamp(min=1)))
        return linear.where(linear > SOFTPLUS_THRESHOLD, losses), valid


@named_as_its_base
class RankedListOfDistinct(RankedList):
    """Leaves out pairs of equal embeddings, at distance 0."""

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> Rows:
        distinct = similarity > 0
        (valid,) = yield (AnyOf(positive.any(1) | negative.any(1)),)
        losses, _ = yield from super().rows(similarity, positive & distinct, negative & distinct)
        return losses, valid
