"""Lightning's Trainer: ``torchrun --standalone --nproc-per-node 2 -m examples lightning_module``."""

from functools import partial
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import contrastive_zoo as cz
from examples.digits import EPOCHS, LEARNING_RATE, make_dataset, make_encoder, make_loader, make_loss
from examples.setup import Setup, Trained, one_process


class Embedder(lightning.LightningModule):
    """Encoder and loss in one module: Lightning wraps both in DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.loss_fn = make_encoder(), cz.DistributedLoss(make_loss())

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return self.loss_fn(self.encoder(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        loss = self.loss_fn(self.encoder(batch[0]), batch[1])
        # the loss is equal on all ranks, so the weight of a batch must be; Lightning's weight is the local batch size
        self.log("validation_loss", loss, batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), LEARNING_RATE, momentum=0.9)


def validation_loader(rank: int = 0, world_size: int = 1) -> DataLoader[Any]:
    batches = [batch.tensor_split(world_size)[rank].tolist() for batch in torch.arange(125).split(31)]
    return DataLoader(make_dataset(), sampler=batches, batch_size=None)


class Digits(lightning.LightningDataModule):
    """This rank's part of each global batch, uneven or empty."""

    trainer: lightning.Trainer

    def train_dataloader(self) -> DataLoader[Any]:
        return make_loader(self.trainer.global_rank, self.trainer.world_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return validation_loader(self.trainer.global_rank, self.trainer.world_size)


def train(data: Any = Digits, sampler: bool = False, **settings: Any) -> Trained:
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", precision="64-true", max_epochs=EPOCHS, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=sampler, **settings,  # Lightning's sampler repeats samples in the last batch
    )  # fmt: skip
    model = Embedder()
    trainer.fit(model, datamodule=data())
    if logged := trainer.callback_metrics:
        losses = [model.loss_fn.loss(model.encoder(images), labels) for images, labels in validation_loader()]
        torch.testing.assert_close(logged["validation_loss"], torch.stack(losses).mean())
    return Trained.of(model.encoder, model.loss_fn)


accumulated = partial(one_process, accumulate=5)
SETUPS = [
    Setup("training and validation", train),
    Setup("accumulation of 5 batches", partial(train, accumulate_grad_batches=5), reference=accumulated),
]
