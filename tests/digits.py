"""A training of scikit-learn's digits under DDP, whose parts a test replaces."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import contrastive_zoo as cz

SAMPLES, BATCH_SIZE, EPOCHS = 155, 32, 2
"""Two epochs of batches of 32, 32, 32, 32 and 27: ten steps."""


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
    from sklearn.datasets import load_digits  # a second: not where tests are collected

    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.from_numpy(images[:samples] / 16), torch.from_numpy(labels[:samples]))


def make_loader(rank: int = 0, world_size: int = 1, *, samples: int = SAMPLES, batch_size: int = BATCH_SIZE) -> Any:
    """Return a loader of this rank's part of every global batch."""
    data, world = make_dataset(samples), cz.World(rank, world_size)
    sampler = cz.data.GlobalBatchSampler(samples, batch_size=batch_size, process_group=world)
    return DataLoader(data, batch_sampler=sampler, collate_fn=cz.data.CollateEmptyBatches(data[0]))


def add_up(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sum gradients over ranks, without DDP's division by their number."""
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


class Right:
    """A right training."""

    def __init__(self) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.model: nn.Module = DistributedDataParallel(make_encoder())
        self.loss_fn: nn.Module = cz.DistributedLoss(make_loss())
        self.loader = make_loader(self.rank, self.world_size)

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def start_epoch(self, epoch: int) -> None:
        self.loader.batch_sampler.set_epoch(epoch)

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return self.loss_fn(self.model(images), labels)

    def backward(self, *batch: Tensor) -> None:
        self.loss(*batch).backward()

    def clip(self) -> None:
        """Change gradients before the optimizer receives them."""

    def step(self) -> None:
        self.optimizer.step()

    def end_step(self) -> None:
        """Do what follows the optimizer."""

    def train(self) -> None:
        self.optimizer = self.make_optimizer([*self.model.parameters(), *self.loss_fn.parameters()])
        for epoch in range(EPOCHS):
            self.start_epoch(epoch)
            for batch in self.loader:
                self.optimizer.zero_grad()
                self.backward(*batch)
                self.clip()
                self.step()
                self.end_step()
