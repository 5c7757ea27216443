"""Batch samplers whose global batches are the same on W processes as on one, and which split each of them over the ranks."""

from contrastive_zoo.sampling.base import DistributedBatchSampler
from contrastive_zoo.sampling.collate import CollateEmpty
from contrastive_zoo.sampling.global_batches import GlobalBatchSampler
from contrastive_zoo.sampling.hard_negatives import HardNegativeBatchSampler
from contrastive_zoo.sampling.m_per_class import MPerClassBatchSampler
from contrastive_zoo.sampling.no_duplicates import NoDuplicatesBatchSampler

__all__ = [
    "CollateEmpty",
    "DistributedBatchSampler",
    "GlobalBatchSampler",
    "HardNegativeBatchSampler",
    "MPerClassBatchSampler",
    "NoDuplicatesBatchSampler",
]
