"""Twenty steps of real training on W processes end where one process ends, whoever reduces the gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import contrastive_zoo as cz
from contrastive_zoo.testing.batch import FEATURES, GlobalBatch
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import close, distance, drawn, numbers

pytestmark = pytest.mark.trainers

STEPS, SAMPLES, D = 20, 8, 3
SPLITS = {  # one after the other, step by step; an empty shard among them
    1: [(8,)],
    2: [(5, 3), (1, 7), (8, 0), (4, 4)],
    3: [(3, 2, 3), (0, 5, 3), (1, 1, 6), (8, 0, 0)],
}
LOSSES: dict[str, Callable[[], nn.Module]] = {
    "of this library": lambda: cz.SupCon(temperature=cz.LearnableTemperature(0.5)),
    "third-party": lambda: losses.ProxyAnchorLoss(4, D, alpha=8),
}
"""With parameters of their own."""


class Trainer(NamedTuple):
    wrap: Callable[[nn.Module], nn.Module] = lambda module: module
    reduce: Callable[[list[nn.Module]], None] = lambda modules: None
    grad_reduction: Any = "mean"


def ddp_that_sums(module: nn.Module) -> nn.Module:
    def hook(_, bucket):  # torch wants its own class in the annotation, or none
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda x: x.value()[0])

    wrapped = DistributedDataParallel(module)
    wrapped.register_comm_hook(None, hook)
    return wrapped


def add_up(modules: list[nn.Module]) -> None:
    for module in modules:
        for parameter in module.parameters():
            dist.all_reduce(parameter.grad)


TRAINERS = {
    "DDP": Trainer(DistributedDataParallel),
    "DDP with a hook that sums": Trainer(ddp_that_sums, grad_reduction="sum"),
    "average_gradients": Trainer(reduce=lambda modules: cz.average_gradients(modules[0])),
    "a sum by hand": Trainer(reduce=add_up, grad_reduction="sum"),
}


class Trained(NamedTuple):
    values: Tensor
    parameters: list[Tensor]


def train(name: str, trainer: str = "", loss_in: str = "nothing", told: Any = None) -> Trained:
    """Train on one process without a trainer, or say another ``grad_reduction`` than the trainer's, a mistake.

    Parameters of the loss are in the trainer around DistributedLoss, in DDP inside of it, or in nothing but the optimiser.
    """
    how = TRAINERS.get(trainer, Trainer())
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, D)).double()
    loss = LOSSES[name]().double()
    bare = [encoder, loss]
    weights = [x for module in bare for x in module.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.02, momentum=0.9)
    if trainer:
        encoder = how.wrap(encoder)
        inner = DistributedDataParallel(loss) if loss_in == "DDP inside" else loss
        loss = cz.DistributedLoss(inner, grad_reduction=told or how.grad_reduction)
        loss = how.wrap(loss) if loss_in == "the trainer" else loss
    values, rank, splits = [], dist.get_rank(), SPLITS[dist.get_world_size()]
    for step in range(STEPS):
        optimizer.zero_grad()
        (x,), labels = GlobalBatch((SAMPLES,), seed=step).samples(), numbers(SAMPLES, seed=step, dtype=torch.int64)
        shards = splits[step % len(splits)]
        value = loss(encoder(x.split(shards)[rank]), labels.split(shards)[rank])
        value.backward()
        values.append(value.detach())
        how.reduce(bare)
        optimizer.step()
    return Trained(torch.stack(values), [x.detach() for x in weights])


@functools.cache
def on_one_process(worlds: Worlds, name: str) -> Trained:
    return worlds.run(1, train, name)[0]


# a parameter outside of the trainer must come out complete by itself; a sum has to reach all of them
INSIDE = [("DDP", "nothing"), ("DDP", "the trainer"), ("DDP", "DDP inside"), ("DDP with a hook that sums", "the trainer"),
          ("average_gradients", "nothing"), ("a sum by hand", "nothing")]  # fmt: skip


@pytest.mark.parametrize(("how", "name", "world_size"), drawn(INSIDE, LOSSES, [2, 3], one_in=2), ids=str)
def test_a_training_ends_as_on_one_process(how: tuple[str, str], name: str, world_size: int, worlds: Worlds) -> None:
    expected = on_one_process(worlds, name)
    for found in worlds.run(world_size, train, name, *how):
        close(found.values, expected.values)
        for x, y in zip(found.parameters, expected.parameters, strict=True):
            close(x, y)


@pytest.mark.parametrize(("trainer", "told"), [("DDP", "sum"), ("a sum by hand", "mean")])
def test_a_wrong_grad_reduction_trains_something_else(trainer: str, told: str, worlds: Worlds) -> None:
    found, expected = worlds.run(2, train, "third-party", trainer, told=told)[0], on_one_process(worlds, "third-party")
    assert distance(found.parameters[0], expected.parameters[0]) > 1e-3


ITEMS, BATCH, ALL_STEPS, SAVED = 50, 12, 12, 7
"""Two epochs of batches of 12, 12, 12, 12 and 2, which some ranks have no part of, and two steps of a third.

The checkpoint is in the middle of the second.
"""


class Training:
    """An encoder, a loss with a memory and a learnt temperature, one with random numbers, AdamW, and a sampler."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.images, self.labels = numbers(ITEMS, 6, seed=1), torch.arange(ITEMS) % 7
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        memory = cz.CrossBatchMemory(cz.SupCon(temperature=cz.LearnableTemperature(0.5)), 20, 4, dtype=torch.float64)
        self.loss_fn = cz.DistributedLoss(memory.double())
        self.random_loss = cz.DistributedLoss(lambda z: (z @ torch.randn(4, 3).double()).square().mean())
        parameters = [*self.encoder.parameters(), *self.loss_fn.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=0.01)
        self.sampler = cz.data.GlobalBatchSampler(ITEMS, batch_size=BATCH, seed=3)
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        parts = {name: getattr(self, name).state_dict() for name in ("encoder", "loss_fn", "optimizer")}
        position = self.sampler.state_dict(step=self.steps - len(self.sampler) * self.sampler.epoch)
        return {**parts, "sampler": position, "random": torch.get_rng_state(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part in ("encoder", "loss_fn", "optimizer", "sampler"):
            getattr(self, part).load_state_dict(state[part])
        torch.set_rng_state(state["random"])
        self.steps = state["steps"]

    def run(self, until: int) -> Iterator[float]:
        while self.steps < until:
            self.sampler.set_epoch(self.steps // len(self.sampler))
            for indices in self.sampler:
                if self.steps == until:
                    return
                self.optimizer.zero_grad()
                z = self.encoder(self.images[indices])
                value = self.loss_fn(z, self.labels[indices]) + 0.1 * self.random_loss(z)
                value.backward()
                cz.average_gradients(self.encoder)
                self.optimizer.step()
                self.steps += 1
                yield value.item()


def train_until(seed: int, until: int, *, save: Path, load: Path | None = None) -> list[float]:
    """The losses on this rank, whose random numbers are its own; those of rank 0 count, and rank 0 saves the end."""
    training = Training()
    torch.manual_seed(seed + dist.get_rank())
    if load is not None:
        training.load_state_dict(torch.load(load, weights_only=True))
    values = list(training.run(until))
    if dist.get_rank() == 0:
        torch.save(training.state_dict(), save)
    return values


def test_a_restart_on_fewer_ranks_continues_the_training(worlds: Worlds, tmp_path: Path) -> None:
    whole, checkpoint, end = (tmp_path / name for name in ("whole", "checkpoint", "end"))
    (expected,) = worlds.run(1, train_until, 0, ALL_STEPS, save=whole)
    for values in worlds.run(4, train_until, 0, SAVED, save=checkpoint):
        assert values == pytest.approx(expected[:SAVED], rel=1e-9)
    for values in worlds.run(2, train_until, 100, ALL_STEPS, save=end, load=checkpoint):
        assert values == pytest.approx(expected[SAVED:], rel=1e-9)
    states = [torch.load(path, weights_only=True) for path in (end, whole)]
    assert states[0].pop("sampler") == states[1].pop("sampler")
    torch.testing.assert_close(*states, rtol=1e-9, atol=1e-9)
    (forgetful,) = worlds.run(1, train_until, 1, 2, save=end)  # the mutant: other random numbers
    assert forgetful != pytest.approx(expected[:2], rel=1e-6)
