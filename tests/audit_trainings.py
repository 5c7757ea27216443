"""Trainings that the audit must name rightly, besides the mistakes of the examples, and right ones it must not accuse."""

from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import contrastive_zoo as cz
from examples.digits import make_dataset, make_encoder, make_loader, make_loss
from examples.mistakes import BATCH_SIZE, EPOCHS, LEARNING_RATE, SAMPLES, Right
from examples.setup import Trained

TRAININGS: dict[str, tuple[Callable[[], Any], str | None]] = {}
"""Trainings by name, each with the diagnosis that is expected; None for a right one."""


def training(name: str, mistake: str | None = None) -> Callable[[type], type]:
    """Register a training."""

    def register(cls: type) -> type:
        TRAININGS[name] = cls, mistake
        return cls

    return register


@training("the same shard on every rank", "same shard")
class SameShard(Right):
    def __init__(self) -> None:
        super().__init__()
        self.loss_fn = cz.DistributedLoss(make_loss(), check_distinct=False)
        self.loader = make_loader(0, self.world_size, samples=SAMPLES, batch_size=BATCH_SIZE)


@training("every rank draws from all samples", "not sharded")
class NotSharded(Right):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(self.rank)
        self.loader = DataLoader(make_dataset(SAMPLES), 16, shuffle=True, generator=generator)

    def start_epoch(self, epoch: int) -> None:
        pass


@training("one rank has fewer batches", "different numbers of steps")
class FewerBatches(Right):
    def __init__(self) -> None:
        super().__init__()
        samples = SAMPLES if self.rank == 0 else 70
        self.loader = make_loader(self.rank, self.world_size, samples=samples, batch_size=BATCH_SIZE)


@training("gradients not reduced", "not reduced")
class NotReduced(Right):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_encoder()  # type: ignore[assignment]  # without DDP


@training('loss parameters not reduced under "sum"', "parameters not reduced")
class SumOutside(Right):
    def __init__(self) -> None:
        super().__init__()
        from examples.ddp import add_up

        self.loss_fn = cz.DistributedLoss(make_loss(), grad_reduction="sum")
        self.model.register_comm_hook(None, add_up)


@training("BatchNorm", "batch statistics")
class BatchNormed(Right):
    def __init__(self) -> None:
        super().__init__()
        self.model = DistributedDataParallel(nn.Sequential(make_encoder(), nn.BatchNorm1d(16)).double())

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return super().loss(images + 0.01, labels)


def distributed() -> nn.Module:
    """Return the loss of the examples, distributed, without the check that refuses gathered embeddings."""
    return cz.DistributedLoss(make_loss(), check_distinct=False)


@training("Fabric's all_gather before DistributedLoss", "gathered first")
class FabricGathered:
    def train(self) -> Trained:
        from examples import fabric

        with patch.object(fabric, "make_loss", distributed):
            return fabric.train(gather=True)


@training("accelerator.gather before DistributedLoss", "gathered first")
class AccelerateGathered:
    def train(self) -> Trained:
        from examples import accelerate_loop

        with patch.object(accelerate_loop, "make_loss", distributed):
            return accelerate_loop.train(120, compute=accelerate_loop.gathered_first)


@training("gathered without gradient", "detached")
class GatheredWithoutGradient(Right):
    def __init__(self) -> None:
        super().__init__()
        self.loss_fn = make_loss()
        self.model = DistributedDataParallel(make_encoder(), find_unused_parameters=True)

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        z = cz.collectives.all_gather(self.model(images).detach()) + 0 * sum(x.sum() for x in self.model.parameters())
        return self.loss_fn(z, cz.collectives.all_gather(labels))


@training("the loss divided by W", "divided by W")
class DividedByW(Right):
    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return super().loss(images, labels) / self.world_size


@training("the gradient of the loss parameters scaled", "parameters scaled")
class ParametersScaled(Right):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.loss_fn.parameters():
            parameter.register_hook(lambda gradient: gradient * self.world_size)


@training("encoder gradient of an unknown mistake", "not recognised")
class Unknown(Right):
    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        z = self.model(images)
        if self.world_size > 1:
            z.register_hook(lambda gradient: gradient.roll(1, 1))
        return self.loss_fn(z, labels)


@training("gradient clipping, Adam, a weight of the loss")
class Clipped(Right):
    def train(self) -> Trained:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        for epoch in range(EPOCHS):
            self.start_epoch(epoch)
            for images, labels in self.loader:
                optimizer.zero_grad()
                (0.3 * self.loss(images, labels)).backward()
                torch.nn.utils.clip_grad_norm_([*self.parameters()], 0.1)
                optimizer.step()
        return Trained.of(self.model, self.loss_fn)


@training("dropout")
class Dropout(Right):
    def __init__(self) -> None:
        super().__init__()
        self.model = DistributedDataParallel(nn.Sequential(nn.Dropout(0.2), make_encoder(), nn.Dropout(0.2)))
        torch.manual_seed(self.rank)


@training("an overflow under GradScaler")
class Overflow(Right):
    def train(self) -> Trained:
        optimizer = torch.optim.SGD(self.parameters(), LEARNING_RATE, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu")
        for step, (images, labels) in enumerate(self.loader):
            optimizer.zero_grad()
            loss = self.loss(images, labels)
            scaler.scale(loss * float("inf") if step == 1 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return Trained.of(self.model, self.loss_fn)


@training("two towers, normalised before the loss")
class Towers(Right):
    def __init__(self) -> None:
        super().__init__()
        self.second = DistributedDataParallel(make_encoder())
        self.loss_fn = cz.DistributedLoss(cz.NTXent(temperature=cz.LearnableTemperature(0.5)).double())

    def parameters(self) -> Iterable[nn.Parameter]:
        return [*super().parameters(), *self.second.parameters()]

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        towers = (nn.functional.normalize(x(images)) for x in (self.model, self.second))
        return self.loss_fn(*towers)


@training("a third-party loss")
class ThirdParty(Right):
    def __init__(self) -> None:
        super().__init__()
        import pytorch_metric_learning.losses as pml

        self.loss_fn = cz.DistributedLoss(pml.ProxyAnchorLoss(10, 16).double(), broadcast_parameters=True)


def run(name: str) -> Any:
    """Run a training by its name, on this rank."""
    return TRAININGS[name][0]().train()
