"""Compute losses without holding the N × N matrix. An engine knows no loss; a loss knows no engine's tiling."""

from contrastive_zoo.engine.implementation import plain_formulas, use_implementation
from contrastive_zoo.engine.tiling import keep_freed_memory, memory_budget

__all__ = ["keep_freed_memory", "memory_budget", "plain_formulas", "use_implementation"]
