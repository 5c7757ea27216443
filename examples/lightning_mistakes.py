"""Lightning with its own sampler, and gathered before the loss: ``python -m examples lightning_mistakes``."""

from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Subset

from examples.digits import ShardedBatches, make_dataset, make_loss
from examples.lightning_module import Digits, Embedder, reference, train
from examples.setup import Setup, main


class OwnSampler(Digits):
    """Lightning replaces the sampler by torch's DistributedSampler, which repeats samples until shards are even."""

    samples = 120

    def train_dataloader(self) -> DataLoader[Any]:
        order = ShardedBatches(self.samples, self.samples)
        order.set_epoch(self.trainer.current_epoch)
        return DataLoader(Subset(make_dataset(self.samples), next(iter(order))), batch_size=15)


class PaddedSampler(OwnSampler):
    samples = 125


class GatherFirst(Embedder):
    def __init__(self) -> None:
        super().__init__()
        self.loss_fn = make_loss()

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        z, labels = self.all_gather(self.encoder(batch[0]), sync_grads=True), self.all_gather(batch[1])
        return self.loss_fn(z.flatten(0, 1), labels.flatten())  # [W, n, d], [W, n]

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.log("validation_loss", 0.0, batch_size=1)


every_epoch = {"sampler": True, "reload_dataloaders_every_n_epochs": 1, "limit_val_batches": 0}
SETUPS = [
    Setup("Lightning's sampler, 125 samples", partial(train, PaddedSampler, **every_epoch),
          reference=partial(reference, batch_size=30), shards="padded",
          mistake="the last batch is padded with repeated samples", fix="use_distributed_sampler=False"),
]  # fmt: skip

if __name__ == "__main__":
    main(SETUPS)
