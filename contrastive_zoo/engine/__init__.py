"""Compute losses without holding the N × N matrix. An engine knows no loss; a loss knows no engine's tiling."""

from contrastive_zoo.engine.batch import reduce_anchors
from contrastive_zoo.engine.implementation import dense

__all__ = ["dense", "reduce_anchors"]
