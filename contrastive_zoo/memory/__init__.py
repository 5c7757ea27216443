"""Memories of earlier batches: the queue, losses against it, and the momentum encoder that computes its keys."""

from contrastive_zoo.memory.cross_batch import CrossBatchMemory
from contrastive_zoo.memory.momentum import MomentumEncoder
from contrastive_zoo.memory.nnclr import NNCLR
from contrastive_zoo.memory.queue import MemoryQueue
from contrastive_zoo.memory.ressl import ReSSL

__all__ = ["NNCLR", "CrossBatchMemory", "MemoryQueue", "MomentumEncoder", "ReSSL"]
