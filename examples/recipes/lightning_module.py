"""Lightning's Trainer: torchrun --standalone --nproc-per-node 2 lightning_module.py"""

import os

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import contrastive_zoo as cz


class Digits(lightning.LightningDataModule):
    def train_dataloader(self):
        images, labels = load_digits(return_X_y=True)
        data = TensorDataset(torch.Tensor(images / 16), torch.tensor(labels))
        # splits each batch of 200 images over the processes; Lightning tells it the epoch
        sampler = cz.data.GlobalBatchSampler(len(data), batch_size=200)
        return DataLoader(data, batch_sampler=sampler, collate_fn=cz.data.CollateEmptyBatches(data[0]))


class Embedder(lightning.LightningModule):
    """Encoder and loss in one module: Lightning wraps both in DDP."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)  # equal parameters on all processes
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 32))
        self.loss_fn = cz.DistributedLoss(cz.SupCon(temperature=cz.LearnableTemperature(0.5)))

    def training_step(self, batch, _):
        x, y = batch
        self.last = self.loss_fn(self.encoder(x), y)  # local embeddings in, the loss of all processes out
        # equal on all processes, so every process has the same weight in the mean
        self.log("loss", self.last.detach(), batch_size=1)
        return self.last

    def on_train_epoch_end(self):
        self.print(f"epoch {self.current_epoch}: loss {self.last.item()}")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    strategy="ddp",
    max_epochs=2,
    use_distributed_sampler=False,  # Lightning's sampler repeats samples in the last batch
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Embedder(), datamodule=Digits())
