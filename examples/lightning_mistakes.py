"""Lightning's own sampler: ``python -m examples lightning_mistakes``."""

from functools import partial
from typing import Any

from torch.utils.data import DataLoader, Subset

from examples.digits import ShardedBatches, make_dataset
from examples.lightning_module import Digits, train
from examples.setup import Setup, main, one_process


class OwnSampler(Digits):
    """Lightning inserts torch's DistributedSampler, which repeats samples until all ranks hold equally many."""

    samples = 120

    def train_dataloader(self) -> DataLoader[Any]:
        order = ShardedBatches(self.samples, self.samples)
        order.set_epoch(self.trainer.current_epoch)
        return DataLoader(Subset(make_dataset(self.samples), next(iter(order))), batch_size=15)


class PaddedSampler(OwnSampler):
    samples = 125


fit = partial(train, sampler=True, reload_dataloaders_every_n_epochs=1, limit_val_batches=0)
even = {"shards": "even", "reference": partial(one_process, samples=120, batch_size=30)}
SETUPS = [
    Setup("Lightning's sampler, 120 samples", partial(fit, OwnSampler), **even),
    Setup(
        "Lightning's sampler, 125 samples", partial(fit, PaddedSampler), shards="padded",
        reference=partial(one_process, batch_size=30), mistake="the last batch is padded with repeated samples",
        fix="use_distributed_sampler=False",
    ),
]  # fmt: skip

if __name__ == "__main__":
    main(SETUPS)
