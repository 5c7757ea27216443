"""Lightning's own sampler, and gathered before the loss: ``python -m examples lightning_mistakes``."""

from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Subset

from examples.digits import ShardedBatches, make_dataset, make_loss
from examples.lightning_module import Digits, Embedder, train
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


class GatherFirst(Embedder):
    """All ranks compute the whole loss of gathered embeddings."""

    sync_grads = True

    def __init__(self) -> None:
        super().__init__()
        self.loss_fn = make_loss()

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        z = self.all_gather(self.encoder(batch[0]), sync_grads=self.sync_grads)
        return self.loss_fn(z.flatten(0, 1), self.all_gather(batch[1]).flatten())  # [W, n, d], [W, n]


class GatherWithoutGradient(GatherFirst):
    sync_grads = False


fit = partial(train, sampler=True, reload_dataloaders_every_n_epochs=1, limit_val_batches=0)
even = {"shards": "even", "reference": partial(one_process, samples=120, batch_size=30)}
SETUPS = [
    Setup("Lightning's sampler, 120 samples", partial(fit, OwnSampler), **even),
    Setup("all_gather(z, sync_grads=True), then the whole loss", partial(fit, OwnSampler, GatherFirst), **even),
    Setup(
        "Lightning's sampler, 125 samples", partial(fit, PaddedSampler), shards="padded",
        reference=partial(one_process, batch_size=30), mistake="the last batch is padded with repeated samples",
        fix="use_distributed_sampler=False",
    ),
    Setup(
        "all_gather(z), then the whole loss", partial(fit, OwnSampler, GatherWithoutGradient), **even,
        mistake="sync_grads=False: gathered without gradient, the encoder is not trained",
        fix="DistributedLoss(loss)(z, labels)",
    ),
]  # fmt: skip

if __name__ == "__main__":
    main(SETUPS)
