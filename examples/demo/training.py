"""The training loop of the demo, the same on every rank of any world size."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

import contrastive_zoo as cz
from contrastive_zoo.metrics import recall_at_k
from contrastive_zoo.testing.worlds import Worlds, report
from examples.demo.recipes import Job, Rows, WrongInfoNCE

HELD_OUT = 360
EVERY = 4  # steps between two evaluations of the held-out loss
SHARES = {1: (1.0,), 2: (0.4, 0.6)}
"""World size -> share of each rank of every batch; uneven, to test uneven shards."""


@dataclass(frozen=True)
class Digits:
    """scikit-learn's 1797 handwritten digits of 8 × 8 pixels, shuffled; the first 360 are held out."""

    images: Tensor
    labels: Tensor

    @classmethod
    def load(cls) -> "Digits":
        """Read the images from the installed package; standardise them with the training images."""
        from sklearn.datasets import load_digits

        bunch = load_digits()
        order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
        images = torch.from_numpy(bunch.images)[order]
        training = images[HELD_OUT:]
        return cls((images - training.mean(0)) / training.std(), torch.from_numpy(bunch.target)[order])


@dataclass(frozen=True)
class Trained:
    """A training on one rank: global held-out loss by step, all parameters in one vector, and held-out embeddings."""

    curve: dict[int, float]
    parameters: Tensor
    before: Rows
    after: Rows


def train(job: Job, digits: Digits) -> Trained:
    """Train ``job`` on the local shard of every batch. Only the sampler depends on the number of ranks."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)  # every rank of every world starts from the same parameters
    encoder, loss = job.encoder(), job.loss()
    held_out_criterion = loss.truth if isinstance(loss, WrongInfoNCE) else loss
    model = DistributedDataParallel(encoder) if job.trainer == "DDP" else encoder
    # DistributedLoss keeps its parameters equal on all ranks; a hand-written loss needs DDP for that.
    criterion = DistributedDataParallel(loss) if isinstance(loss, WrongInfoNCE) else loss
    groups: list[dict[str, Any]] = [
        {"params": list(encoder.parameters())},
        {"params": list(loss.parameters()), "lr": job.rate / 10},
    ]
    optimizer = torch.optim.SGD(groups, lr=job.rate, momentum=0.9)

    def compute_loss(module: torch.nn.Module, criterion: torch.nn.Module, index: Tensor) -> Tensor:
        index = local_shard(index)
        rows = module(digits.images[index])
        return criterion(*rows, digits.labels[index]) if job.labelled else criterion(*rows)

    @torch.no_grad()
    def held_out_loss() -> float:
        return compute_loss(encoder, held_out_criterion, torch.arange(min(job.batch, HELD_OUT))).item()

    @torch.no_grad()
    def held_out_rows() -> Rows:
        return tuple(encoder(digits.images[:HELD_OUT]))

    before, curve = held_out_rows(), {0: held_out_loss()}
    batches = torch.Generator().manual_seed(0)  # the same global batches in every world
    for step in range(1, job.steps + 1):
        batch = HELD_OUT + torch.randperm(len(digits.images) - HELD_OUT, generator=batches)[: job.batch]
        optimizer.zero_grad()
        compute_loss(model, criterion, batch).backward()
        if job.trainer == "average_gradients":
            cz.average_gradients(encoder)
        optimizer.step()
        if step % EVERY == 0 or step == job.steps:
            curve[step] = held_out_loss()
            report(step)
    parameters = parameters_to_vector([*encoder.parameters(), *loss.parameters()])
    return Trained(curve, parameters, before, held_out_rows())


def local_shard(batch: Tensor) -> Tensor:
    world = cz.World.of()
    shares = SHARES[world.size]
    start, stop = (round(len(batch) * sum(shares[:rank])) for rank in (world.rank, world.rank + 1))
    return batch[start:stop]


@dataclass(frozen=True)
class Comparison:
    """One job on one process and on each of two ranks."""

    job: Job
    one_process: Trained
    two_processes: tuple[Trained, ...]

    @property
    def difference(self) -> float:
        """Return the largest difference between a parameter on one process and on any rank of two."""
        return self._difference_from(self.one_process)

    @property
    def difference_between_ranks(self) -> float:
        return self._difference_from(self.two_processes[0])

    def _difference_from(self, reference: Trained) -> float:
        all_ranks = torch.stack([rank.parameters for rank in self.two_processes])
        return (all_ranks - reference.parameters).abs().max().item()  # torch's max returns NaN if any is NaN

    def recall(self, rows: Rows, digits: Digits) -> float:
        """Return R@1 of held-out embeddings: whether the nearest one is the other view, or has the same class."""
        return recall_at_k(*rows, labels=digits.labels[:HELD_OUT] if self.job.labelled else None)


def run(
    job: Job, world_size: int, digits: Digits, worlds: Worlds, on_step: Callable[[int], None] = lambda step: None
) -> tuple[Trained, ...]:
    """Train ``job`` on ``world_size`` processes; return the result of every rank."""

    def on_message(rank: int, step: int) -> None:
        if rank == 0:
            on_step(step)

    return tuple(worlds.run(world_size, train, job, digits, timeout=300, on_message=on_message))
