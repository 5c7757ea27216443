"""A memory of earlier batches: the ring of rows, any loss against it, and the slowly moving encoder that fills it."""

from contrastive_zoo.memory.cross_batch import CrossBatchMemory
from contrastive_zoo.memory.momentum import MomentumEncoder
from contrastive_zoo.memory.queue import MemoryQueue

__all__ = ["CrossBatchMemory", "MemoryQueue", "MomentumEncoder"]
