"""Memories of earlier batches: the queue, losses against it, and the momentum encoder that computes its keys."""

from contrastive_zoo.memory.cross_batch import CrossBatchMemory
from contrastive_zoo.memory.momentum import MomentumEncoder
from contrastive_zoo.memory.queue import MemoryQueue

__all__ = ["CrossBatchMemory", "MemoryQueue", "MomentumEncoder"]
