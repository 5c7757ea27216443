"""Lightning's own sampler: ``python -m examples lightning_mistakes``."""

from functools import partial
from typing import Any

from torch.utils.data import DataLoader, Subset

from examples.digits import ShardedBatches, make_dataset
from examples.lightning_module import Digits, train
from examples.setup import Setup, one_process


class OwnSampler(Digits):
    """Lightning inserts torch's DistributedSampler, which shuffles, and repeats samples until shards are even."""

    def train_dataloader(self) -> DataLoader[Any]:
        order = ShardedBatches(125, 125)
        order.set_epoch(self.trainer.current_epoch)
        return DataLoader(Subset(make_dataset(), next(iter(order))), batch_size=15)


fit = partial(train, sampler=True, reload_dataloaders_every_n_epochs=1, limit_val_batches=0)
SETUPS = [
    Setup(
        "Lightning's sampler, 125 samples", partial(fit, OwnSampler), shards="padded",
        reference=partial(one_process, batch_size=30), mistake="another order, and a padded last batch",
        fix="use_distributed_sampler=False",
    ),
]  # fmt: skip
