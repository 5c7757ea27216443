"""Bases of the variants that return pytorch-metric-learning's values on degenerate batches."""

from typing import TypeVar

import torch
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.row_loss import RowLoss

K = TypeVar("K", bound=type[Loss])


def named_as_its_base(cls: K) -> K:
    """Give a variant the name of the public loss that it derives from: errors and ``repr`` then name a loss users know."""
    cls.__name__ = cls.__bases__[-1].__name__  # after any mixin
    return cls


class ZeroBelowCount(RowLoss):
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
        """Add a block's share of the two counts."""
        self._counts.append(torch.stack([first, second]))

    def is_zero(self, counts: Tensor) -> Tensor:
        """Return whether the loss is 0, given the two counts over all ranks.

        Raises:
            NotImplementedError: a subclass defines it.
        """
        raise NotImplementedError
