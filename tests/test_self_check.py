"""A user's own loss does the same on every rank, or is refused. tests/random_steps hides numbers and generators in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.loss_base.settings import Learnable
from contrastive_zoo.ranks.fingerprint import level_of, levels_differ, norm_and_sketch
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import numbers
from tests.random_steps.user_code import HidesInCompute, HidesInRows

STEPS = 4
SHARDS = ((3, 5), (6, 2), (4, 4), (0, 8))


class DrawsInCompute(HidesInCompute):
    def compute(self, batch: Batch) -> Tensor:
        return batch.reduce(batch.rows["embeddings"].square().sum(1)) * torch.rand((), dtype=torch.float64)


class DropsInCompute(HidesInCompute):
    def compute(self, batch: Batch) -> Tensor:
        return batch.reduce(nn.functional.dropout(batch.rows["embeddings"]).square().sum(1))


class LearnsSetting(HidesInCompute):
    scale: Learnable = 1.0

    def compute(self, batch: Batch) -> Tensor:
        return batch.reduce(batch.settings.scale * batch.rows["embeddings"].square().sum(1))


class ScaleAfter(HidesInCompute):
    def compute(self, batch: Batch) -> Tensor:
        return (self.weight * batch.reduce(batch.rows["embeddings"].square().sum(1))).sum()


LOSSES: dict[str, tuple[Callable[[], Any], str]] = {
    "torch.rand in compute": (DrawsInCompute, "its last value came out differently"),
    "dropout in compute": (DropsInCompute, "the same samples"),
    "a learnable setting before the mean": (
        lambda: LearnsSetting(scale=nn.Parameter(torch.ones(1, dtype=torch.float64))),
        "batch.shared",
    ),
}
"""Losses that ranks draw or differentiate apart, and words of the error."""

RIGHT: dict[str, Callable[[], Any]] = {
    "rows": HidesInRows,
    "compute, a shared parameter": HidesInCompute,
    "a parameter after the mean": ScaleAfter,
}


def batch(step: int) -> tuple[Tensor, Tensor]:
    return 0.3 * numbers(8, 6, seed=step), torch.arange(8) % 3


def trained(make: Callable[[], Any], *, splits: str = "always", steps: int = STEPS) -> tuple[list[float], str]:
    """The values of the steps on this rank, and the error that ended them; ranks split the loss of some batches."""
    torch.manual_seed(dist.get_rank())
    loss_fn, values = cz.DistributedLoss(make()), []
    for step in range(steps):
        with splitting(always=splits == "always" or (splits == "some" and step % 3 > 0)):
            sizes = SHARDS[step % len(SHARDS)]
            rows = [x.split(list(sizes))[dist.get_rank()].clone() for x in batch(step)]
            try:
                value = loss_fn(rows[0].requires_grad_(), rows[1])
                value.backward()
            except ValueError as error:
                return values, str(error)
            values.append(value.item())
    return values, ""


@pytest.mark.parametrize("name", LOSSES)
def test_what_differs_is_refused(name: str, worlds: Worlds) -> None:
    make, words = LOSSES[name]
    (values, first), (_, second) = worlds.run(2, trained, make)
    assert first == second
    assert words in first, (values, first)


@pytest.mark.parametrize("splits", ["always", "some", "never"])
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_not(name: str, splits: str, worlds: Worlds) -> None:
    for values, error in worlds.run(2, trained, RIGHT[name], splits=splits, steps=12):
        assert error == ""
        alone = RIGHT[name]()
        assert values == [pytest.approx(alone(*batch(step)).item(), rel=1e-12) for step in range(12)]


class Bank(nn.Module):
    """As lightly's losses with a memory: what its buffers hold is left to chance until a first forward pass."""

    def __init__(self, *, alike: bool = True) -> None:
        super().__init__()
        self.alike = alike
        self.register_buffer("bank", torch.full((4, 6), 1e3 * (1 + dist.get_rank()), dtype=torch.float64))
        self.register_buffer("pointer", torch.tensor([10**6 + dist.get_rank()]))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        if self.pointer > 100:
            self.pointer.zero_()
            self.bank.zero_()
        self.pointer += 1
        self.bank[self.pointer % 4] = embeddings.detach().mean(0)
        return (embeddings @ self.bank.T).square().sum() + 0 * labels.sum()


def one_pointer_moves() -> str:
    loss, error = Bank(), ""
    loss_fn = cz.DistributedLoss(loss)
    for step in range(4):
        rows = [x.split([3, 5])[dist.get_rank()] for x in batch(step)]
        if step == 2:
            loss.pointer += 50 + (dist.get_rank() if dist.get_world_size() > 1 else 0)
        try:
            loss_fn(*rows)
        except ValueError as raised:
            error = f"{step}: {raised}"
            break
    return error


def test_buffers_are_compared_once_a_forward_pass_has_written_them(worlds: Worlds) -> None:
    for values, error in worlds.run(2, trained, Bank):
        assert (len(values), error) == (STEPS, "")
    first, second = worlds.run(2, one_pointer_moves)
    assert first == second
    assert first.startswith("2: "), first
    assert "pointer" in first


@pytest.mark.parametrize("of", [0, 3, 65535, 2**24, 2**40])
def test_neighbouring_counts_differ_clearly(of: int) -> None:
    levels = [level_of(norm_and_sketch(torch.tensor([x])).tolist()) for x in (of, of + 1)]
    assert levels_differ(levels, 10, 2**-23)
