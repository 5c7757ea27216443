"""Digits for the examples of losses: halves of an image, augmented views, a rank's part of a batch, what was learnt."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.metrics.plots import TEN, principal_plane

BATCH_SIZE, TRAINED = 256, 1280
"""Samples of a global batch; samples to train on. The other 517 images are held out."""


def encoder(inputs: int = 64) -> nn.Module:
    """Return an encoder of rows in float64, equal on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 32)).double()


def images() -> tuple[Tensor, Tensor]:
    pixels, labels = load_digits(return_X_y=True)
    return torch.from_numpy(pixels / 16).view(-1, 8, 8), torch.from_numpy(labels)


def augmented(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Return images shifted by up to two pixels, with noise, as rows. All ranks draw for the whole batch."""
    shifts = torch.randint(-2, 3, (len(pixels), 2), generator=generator)
    moved = [torch.roll(x, shift.tolist(), (0, 1)) for x, shift in zip(pixels, shifts, strict=True)]
    noise = torch.randn(pixels.shape, generator=generator, dtype=pixels.dtype)
    return (torch.stack(moved) + 0.1 * noise).flatten(1)


def batches(epochs: int) -> Iterator[tuple[Tensor, torch.Generator]]:
    """Yield the indices of each global batch, and a generator that is in the same state on every rank."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for indices in torch.randperm(TRAINED, generator=generator).split(BATCH_SIZE):
            yield indices, generator


def local(rows: Tensor) -> Tensor:
    return rows.tensor_split(dist.get_world_size())[dist.get_rank()]


def held_out() -> Tensor:
    """Return the images that are not trained on, shifted, as rows: a pixel by itself says little."""
    return augmented(images()[0][TRAINED:], torch.Generator().manual_seed(1))


class Result(NamedTuple):
    """The loss of each step, held-out embeddings before and after, their labels, and recall@1 before and after."""

    losses: list[float]
    before: Tensor
    after: Tensor
    labels: Tensor
    recall_before: float
    recall_after: float


def result(losses: list[float], before: Tensor, after: Tensor) -> Result:
    labels = images()[1][TRAINED:]
    before_, after_ = (cz.metrics.recall_at_k(x, labels=labels, process_group=cz.World()) for x in (before, after))
    return Result(losses, before.detach(), after.detach(), labels, before_, after_)


def difference(one: Result, several: Result) -> float:
    """Return the largest difference of losses and held-out embeddings of two trainings."""
    of_losses = max(abs(a - b) for a, b in zip(one.losses, several.losses, strict=True))
    return max(of_losses, (one.after - several.after).abs().max().item())


def draw(title: str, one: Result, several: Result, path: Path) -> None:
    """Draw the losses on one process and on two, and the plane of the largest variance before and after training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), dpi=80, layout="constrained")
    curve, *planes = figure.subplots(1, 3, width_ratios=(4, 3, 3))
    curve.plot(one.losses, lw=6, alpha=0.4, label="one process")
    curve.plot(several.losses, color="black", ls="--", lw=1.2, label="two processes")
    curve.set(xlabel="step", ylabel="loss", title=title)
    curve.legend(frameon=False)
    views = (("before", one.before, one.recall_before), ("after", one.after, one.recall_after))
    for plane, (when, rows, recall) in zip(planes, views, strict=True):
        points, colours = principal_plane(rows.float()).numpy(), [TEN[x % 10] for x in one.labels.tolist()]
        plane.scatter(points[:, 0], points[:, 1], s=6, c=colours, linewidths=0)
        plane.set(xticks=[], yticks=[], title=f"{when}: recall@1 {100 * recall:.0f} %")
    figure.savefig(path)
