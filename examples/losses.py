"""Small trainings with one loss each, on scikit-learn's digits, which ``python -m examples.demo`` runs and compares.

Each begins with a function of this module that returns the model, what is optimized, and the loss of a global batch.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Generator, Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import contrastive_zoo as cz
from contrastive_zoo.losses.cross_batch_memory import CrossBatchMemory
from contrastive_zoo.losses.memory_queue import MomentumEncoder

BATCH_SIZE, TRAINED = 256, 1280
"""Samples of a global batch; samples to train on. The other 517 images are held out."""

LossOfBatch = Callable[[Tensor, Generator], Tensor]
"""A function of the indices of a global batch, and of a generator that is in the same state on every rank."""

Started = tuple[DistributedDataParallel, Iterable[nn.Parameter], LossOfBatch]


def simclr() -> Started:
    """Two augmented views of each digit, no labels."""
    model, (pixels, _) = DistributedDataParallel(encoder()), images()
    loss_fn = cz.DistributedLoss(cz.NTXent(temperature=0.2))

    def loss(indices: Tensor, generator: Generator) -> Tensor:
        view1, view2 = (local(augmented(pixels[indices], generator)) for _ in range(2))
        return loss_fn(*model(torch.cat([view1, view2])).chunk(2))

    return model, model.parameters(), loss


def sup_con() -> Started:
    """Labelled digits; the classes are the positives."""
    model, (pixels, labels) = DistributedDataParallel(encoder()), images()
    loss_fn = cz.DistributedLoss(cz.SupCon(temperature=cz.LearnableTemperature(0.2)).double())

    def loss(indices: Tensor, generator: Generator) -> Tensor:
        return loss_fn(model(local(augmented(pixels[indices], generator))), local(labels[indices]))

    return model, [*model.parameters(), *loss_fn.parameters()], loss


class Towers(nn.Module):
    """An encoder of the upper half of a digit and one of the lower, under one DDP, because a step trains both."""

    def __init__(self) -> None:
        super().__init__()
        self.upper, self.lower = encoder(32), encoder(32)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.upper(rows[:, :32]), self.lower(rows[:, 32:])


def two_towers(loss_fn: nn.Module | None = None) -> Started:
    """CLIP's loss, which learns its temperature, of two encoders; or another loss of them, whose parameters DDP reduces."""
    model, (pixels, _) = DistributedDataParallel(Towers()), images()
    loss_fn = cz.DistributedLoss(cz.Clip().double()) if loss_fn is None else DistributedDataParallel(loss_fn.double())

    def loss(indices: Tensor, generator: Generator) -> Tensor:
        return loss_fn(*model(local(augmented(pixels[indices], generator))))

    return model, [*model.parameters(), *loss_fn.parameters()], loss


def moco() -> Started:
    """Keys of a momentum encoder, and a queue of earlier keys as negatives."""
    model, (pixels, _) = DistributedDataParallel(encoder()), images()
    keys = MomentumEncoder(model, momentum=0.99)
    loss_fn = cz.DistributedLoss(CrossBatchMemory(cz.InfoNCE(temperature=0.1), size=1024, embedding_size=32).double())

    def loss(indices: Tensor, generator: Generator) -> Tensor:
        keys.update(model)  # after the last step
        view1, view2 = (local(augmented(pixels[indices], generator)) for _ in range(2))
        return loss_fn(model(view1), keys(view2))

    return model, model.parameters(), loss


def pml_miner() -> Started:
    """A loss and a miner of pytorch-metric-learning, on the embeddings of all processes."""
    from pytorch_metric_learning import losses, miners

    model, (pixels, labels) = DistributedDataParallel(encoder()), images()
    loss_fn = cz.DistributedLoss(losses.MultiSimilarityLoss(), miner=miners.MultiSimilarityMiner())

    def loss(indices: Tensor, generator: Generator) -> Tensor:
        return loss_fn(model(local(augmented(pixels[indices], generator))), local(labels[indices]))

    return model, model.parameters(), loss


class Result(NamedTuple):
    """The loss of each step, and held-out embeddings before and after the training."""

    losses: list[float]
    before: Tensor
    after: Tensor


def train(start: Callable[[], Started], epochs: int) -> Result:
    """Train on this process, one of several; every rank returns the same."""
    torch.set_default_dtype(torch.float64)
    model, parameters, loss = start()
    optimizer = torch.optim.Adam(parameters, lr=2e-3)
    losses, before = [], held_out_embeddings(model)
    for indices, generator in batches(epochs):
        value = loss(indices, generator)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return Result(losses, before, held_out_embeddings(model))


def encoder(inputs: int = 64) -> nn.Module:
    """Return an encoder of rows in float64, equal on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 32)).double()


def images() -> tuple[Tensor, Tensor]:
    pixels, labels = load_digits(return_X_y=True)
    return torch.from_numpy(pixels / 16).view(-1, 8, 8), torch.from_numpy(labels)


def augmented(pixels: Tensor, generator: Generator) -> Tensor:
    """Return images shifted by up to two pixels, with noise, as rows. All ranks draw for the whole batch."""
    shifts = torch.randint(-2, 3, (len(pixels), 2), generator=generator)
    moved = [torch.roll(x, shift.tolist(), (0, 1)) for x, shift in zip(pixels, shifts, strict=True)]
    noise = torch.randn(pixels.shape, generator=generator, dtype=pixels.dtype)
    return (torch.stack(moved) + 0.1 * noise).flatten(1)


def batches(epochs: int) -> Iterator[tuple[Tensor, Generator]]:
    """Yield the indices of each global batch, and a generator that is in the same state on every rank."""
    generator = Generator().manual_seed(0)
    for _ in range(epochs):
        for indices in torch.randperm(TRAINED, generator=generator).split(BATCH_SIZE):
            yield indices, generator


def local(x: Tensor) -> Tensor:
    """Return this rank's part of a batch: rank r has r + 1 parts of equal size."""
    world = cz.World.of()
    start, stop = (len(x) * r * (r + 1) // (world.size * (world.size + 1)) for r in (world.rank, world.rank + 1))
    return x[start:stop]


def held_out() -> Tensor:
    """Return the images that are not trained on, shifted, as rows: a pixel by itself says little."""
    return augmented(images()[0][TRAINED:], Generator().manual_seed(1))


def held_out_embeddings(model: DistributedDataParallel) -> Tensor:
    rows = model.module(held_out())
    return (torch.cat(rows, 1) if isinstance(rows, tuple) else rows).detach()
