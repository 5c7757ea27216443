"""What all examples train: an encoder of scikit-learn's digits, a loss with parameters of its own, and batches."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import contrastive_zoo as cz

SAMPLES, BATCH_SIZE, EPOCHS = 125, 31, 2
"""Two epochs of batches of 31, 31, 31, 31 and 1: ten steps, uneven shards on two processes, one of them empty."""

LEARNING_RATE = 0.1


def make_encoder() -> nn.Module:
    """Return the encoder with its initial parameters, the same on every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 16)).double()


def make_loss() -> nn.Module:
    """Return a loss of labelled embeddings with two kinds of parameters: a learnable temperature, and proxies."""
    torch.manual_seed(1)
    with_temperature = cz.SupCon(temperature=cz.LearnableTemperature(0.5))
    with_proxies = cz.ProxyAnchor(num_classes=10, embedding_size=16, alpha=8)
    return cz.WeightedSum([with_temperature, with_proxies]).double()


def make_dataset(samples: int = SAMPLES) -> TensorDataset:
    """Return images [samples, 64] in [0, 1] and labels [samples]."""
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.from_numpy(images[:samples] / 16), torch.from_numpy(labels[:samples]))


class EncoderWithLoss(nn.Module):
    """The encoder and a loss as one module, of both of which a trainer reduces or updates the parameters."""

    def __init__(self, loss_fn: nn.Module) -> None:
        super().__init__()
        self.encoder, self.loss_fn = make_encoder(), loss_fn

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return self.loss_fn(self.encoder(images), labels)


class ShardedBatches(cz.data.BaseBatchSampler):
    """Split each global batch over the ranks, in rank order: no sample is repeated, none is left out."""

    def __init__(self, samples: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        super().__init__({"samples": samples, "batch_size": batch_size}, process_group=cz.World(rank, world_size))
        self.samples, self.batch_size = samples, batch_size

    def global_batches(self, epoch: int) -> list[NDArray[np.int64]]:
        order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(epoch))
        return [batch.numpy() for batch in order.split(self.batch_size)]


def make_loader(
    rank: int = 0, world_size: int = 1, *, samples: int = SAMPLES, batch_size: int = BATCH_SIZE
) -> DataLoader[tuple[Tensor, ...]]:
    """Return a loader of this rank's part of every global batch.

    The sampler yields whole batches, so ``batch_size`` of the loader is None; the dataset also accepts an empty list.
    """
    batches = ShardedBatches(samples, batch_size, rank, world_size)
    return DataLoader(make_dataset(samples), sampler=batches, batch_size=None)


def run_steps(
    loss: Callable[[Tensor, Tensor], Tensor], optimizer: torch.optim.Optimizer, loader: Any, accumulate: int = 1
) -> None:
    """Train with a loss of images and labels in a plain loop; the mean gradient of ``accumulate`` batches is one step."""
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for i, (images, labels) in enumerate(loader):
            (loss(images, labels) / accumulate).backward()
            if (i + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
