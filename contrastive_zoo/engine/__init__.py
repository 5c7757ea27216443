"""Compute losses without holding the N × N matrix. An engine knows no loss; a loss knows no engine's tiling."""

from contrastive_zoo.engine.dense_mode import dense
from contrastive_zoo.engine.reduction import reduce_anchors

__all__ = ["dense", "reduce_anchors"]
