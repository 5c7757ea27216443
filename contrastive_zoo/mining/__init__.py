"""Hard negatives of the rows of all ranks, the same for every split: by a search, refreshed in training, or by a miner."""

from contrastive_zoo.mining.hard_negatives import mine_hard_negatives
from contrastive_zoo.mining.miner import DistributedMiner
from contrastive_zoo.mining.refreshed import RefreshedNegatives

__all__ = ["DistributedMiner", "RefreshedNegatives", "mine_hard_negatives"]
