"""Before a batch and after it: batch samplers and hard-negative mining, the same for every split over the ranks."""

from typing import TYPE_CHECKING

from contrastive_zoo.data.batch_sampler import BaseBatchSampler, CollateEmptyBatches, GlobalBatchSampler
from contrastive_zoo.data.column_samplers import MPerClassBatchSampler, NoDuplicatesBatchSampler, TokenBatchSampler
from contrastive_zoo.data.dataset_sampler import OneDatasetBatchSampler
from contrastive_zoo.data.miner import DistributedMiner
from contrastive_zoo.data.mining import mine_hard_negatives
from contrastive_zoo.ranks.suggestions import missing
from contrastive_zoo.wrapper.token_chunks import token_chunks

__all__ = [
    "BaseBatchSampler",
    "CollateEmptyBatches",
    "DistributedMiner",
    "GlobalBatchSampler",
    "MPerClassBatchSampler",
    "NoDuplicatesBatchSampler",
    "OneDatasetBatchSampler",
    "TokenBatchSampler",
    "mine_hard_negatives",
    "token_chunks",
]

if not TYPE_CHECKING:  # a checker would take any name
    __getattr__ = missing(__name__, __all__)
