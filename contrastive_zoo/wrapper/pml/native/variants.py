"""Variants of this library's losses that return pytorch-metric-learning's values where the formulas leave them open."""

from typing import TypeVar

import torch
from torch import Tensor

from contrastive_zoo.engine.anchor_block import AnchorBlock
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.row_statistics import AnyOf, LogSumExp, Rows, run
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.row_loss import RowLoss
from contrastive_zoo.losses.pair_margins import Margin, RankedList
from contrastive_zoo.losses.redundancy import VICReg
from contrastive_zoo.losses.soft_margins import Circle, MultiSimilarity
from contrastive_zoo.losses.sup_con import NCA, SupCon
from contrastive_zoo.losses.triplet import Triplet

SOFTPLUS_THRESHOLD = 20  # above it torch's softplus is the identity (``threshold`` of ``torch.nn.functional.softplus``)

K = TypeVar("K", bound=type[Loss])


def named_as_its_base(cls: K) -> K:
    """Give a variant the name of the public loss that it derives from: errors and ``repr`` then name a loss users know."""
    cls.__name__ = cls.__bases__[-1].__name__  # after any mixin
    return cls


class _ZeroBelowCount(RowLoss):
    """A row loss whose value and gradient are 0 if :meth:`is_zero` of two counts over all ranks is true."""

    def can_ring(self) -> bool:
        """Blocks are counted as they are computed, which happens several times in a ring."""
        return False

    def compute(self, batch: Batch) -> Tensor:
        self._counts: list[Tensor] = []
        value = super().compute(batch)
        counts, self._counts = torch.stack([value.new_zeros(2, dtype=torch.long), *self._counts]).sum(0), []
        return value * ~self.is_zero(batch.sum(counts, gradient="complete"))

    def count(self, first: Tensor, second: Tensor) -> None:
        self._counts.append(torch.stack([first, second]))

    def is_zero(self, counts: Tensor) -> Tensor:
        """Return whether the loss is 0, given the two counts over all ranks."""
        raise NotImplementedError


@named_as_its_base
class FirstHardestTriplet(Triplet):
    """Mines the first of equally hard candidates, as BatchHardMiner does."""

    first_of_equals = True


@named_as_its_base
class MinedMultiSimilarity(_ZeroBelowCount, MultiSimilarity):
    """0 if at most one positive and one negative pair are mined from the batch."""

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> Rows:
        rows = super().rows(similarity, positive, negative)
        results = next(rows)
        if self.epsilon is not None:  # these were the thresholds
            results = rows.send((yield results))
        positives, negatives, valid = results
        assert isinstance(positives, LogSumExp)
        assert isinstance(negatives, LogSumExp)
        self.count(positives.mask.sum(), negatives.mask.sum())
        _, result = run(rows, (yield positives, negatives, valid))
        assert result is not None
        return result

    def is_zero(self, counts: Tensor) -> Tensor:
        return (counts <= 1).all()


@named_as_its_base
class CircleWithThreshold(Circle):
    """The outer softplus is linear above :data:`SOFTPLUS_THRESHOLD`, as torch's is."""

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> Rows:
        losses, valid = yield from super().rows(similarity, positive, negative)
        linear = losses + torch.log1p(-torch.exp(-losses.clamp(min=1)))
        return linear.where(linear > SOFTPLUS_THRESHOLD, losses), valid


@named_as_its_base
class MarginOfTriplets(_ZeroBelowCount, Margin):
    """Without the term ν β if there is no triplet, or, with one β per class, if no pair is active."""

    def on_block(self, block: AnchorBlock) -> Rows:
        losses, counts = yield from super().on_block(block)
        self.count((counts > 0).sum(), (counts >= 1).sum())
        return losses, counts

    def is_zero(self, counts: Tensor) -> Tensor:
        triplets, active = counts
        return (triplets if self.num_classes is None else active) == 0


@named_as_its_base
class SupConOfSeveralClasses(SupCon):
    """0 without gradient if all samples are of one class: there is no negative pair."""

    def compute(self, batch: Batch) -> Tensor:
        value, labels = super().compute(batch), batch.rows.get("labels", batch.indices())
        edges = [labels.max(), ~labels.min()] if len(labels) else [labels.new_tensor(torch.iinfo(labels.dtype).min)] * 2
        highest, inverted_lowest = batch.maximum(torch.stack(edges)).unbind()
        return value * (highest != ~inverted_lowest)


@named_as_its_base
class NCAOfPositives(NCA):
    """NaN, the mean of nothing, if all of several samples have no positive."""

    def compute(self, batch: Batch) -> Tensor:
        value = super().compute(batch)
        if self.reduction != "mean" or batch.total == 1:
            return value
        all_ids = batch.gathered(batch.int64(batch.rows["labels"]))
        return value if len(all_ids.unique()) < len(all_ids) else value + torch.nan


@named_as_its_base
class RankedListOfDistinct(RankedList):
    """Leaves out pairs of equal embeddings, at distance 0."""

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> Rows:
        distinct = similarity > 0
        (valid,) = yield (AnyOf(positive.any(1) | negative.any(1)),)
        losses, _ = yield from super().rows(similarity, positive & distinct, negative & distinct)
        return losses, valid


@named_as_its_base
class VICRegOfTwo(VICReg):
    """NaN for a single sample, which has no variance."""

    def degrees(self, count: int) -> int:
        return count - 1
