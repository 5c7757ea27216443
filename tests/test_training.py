"""A training that is saved on some ranks and continued on fewer is the training of one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import numbers

pytestmark = pytest.mark.trainers

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
