"""A user's own loss does the same on every rank, or is refused: what it does is compared, whatever it holds."""

from __future__ import annotations

import argparse
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.loss_base.loss import Inputs, Loss
from contrastive_zoo.loss_base.settings import Learnable
from contrastive_zoo.ranks.fingerprint import level_of, levels_differ, norm_and_sketch
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import numbers

STEPS = 4
SHARDS = ((3, 5), (6, 2), (4, 4), (0, 8))


class Plain:
    def __init__(self, factor: float) -> None:
        self.factor = factor


class Slotted:
    __slots__ = ("factor",)

    def __init__(self, factor: float) -> None:
        self.factor = factor


GLOBAL = {"factor": 1.0}


def multiply(x: Tensor, factor: float) -> Tensor:
    return factor * x


HOLDERS: dict[str, Callable[[float], Callable[[Tensor], Tensor]]] = {
    "a namespace": lambda f: functools.partial(lambda x, of: of.factor * x, of=argparse.Namespace(factor=f)),
    "a plain object": lambda f: functools.partial(lambda x, of: of.factor * x, of=Plain(f)),
    "an object with slots": lambda f: functools.partial(lambda x, of: of.factor * x, of=Slotted(f)),
    "a function": lambda f: lambda x: f * x,
    "a partial": lambda f: functools.partial(multiply, factor=f),
}


class HiddenInRows(cz.RowLoss):
    def __post_init__(self) -> None:
        self.scaled: Callable[[Tensor], Tensor] = lambda x: x

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        return self.scaled(similarity * negative).exp().sum(1).log(), negative.any(1)


class HiddenInCompute(Loss):
    def __post_init__(self) -> None:
        self.scaled: Callable[[Tensor], Tensor] = lambda x: x

    def inputs(self, embeddings: Tensor, labels: Tensor) -> Inputs:
        return Inputs.of({"embeddings": embeddings, "labels": labels})

    def compute(self, batch: Batch) -> Tensor:
        z = batch.rows["embeddings"]
        similarity = z @ batch.gather_detached(z).T
        return batch.reduce(self.scaled(similarity).exp().sum(1).log())


class OfClass(HiddenInRows):
    factor = 1.0

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        return (type(self).factor * similarity * negative).sum(1), negative.any(1)


class OfModule(HiddenInRows):
    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        return (GLOBAL["factor"] * similarity * negative).sum(1), negative.any(1)


def hidden(kind: type[Any], holder: str) -> Any:
    loss = kind()
    if holder == "a class attribute":
        OfClass.factor = 1.0 + dist.get_rank()
    elif holder == "a global":
        GLOBAL["factor"] = 1.0 + dist.get_rank()
    else:
        loss.scaled = HOLDERS[holder](1.0 + dist.get_rank())
    return loss


class DrawsInRows(cz.RowLoss):
    def __post_init__(self) -> None:
        self.noise: Callable[[Tensor], Tensor] = torch.zeros_like

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        return ((similarity + self.noise(similarity)) * negative).sum(1), negative.any(1)


def forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.randn_like(x)


def of_torch() -> Callable[[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda x: torch.randn(x.shape, generator=generator, dtype=x.dtype)


def of_numpy() -> Callable[[Tensor], Tensor]:
    generator = np.random.default_rng(0)
    return lambda x: torch.from_numpy(generator.standard_normal(tuple(x.shape)))


def of_python() -> Callable[[Tensor], Tensor]:
    generator = random.Random(0)
    return lambda x: x.new_tensor([[generator.random() for _ in row] for row in x]).reshape(x.shape)


GENERATORS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "torch.Generator": of_torch,
    "numpy.random.default_rng": of_numpy,
    "random.Random": of_python,
    "fork_rng and manual_seed": lambda: forked,
}


def drawing(name: str) -> DrawsInRows:
    loss = DrawsInRows()
    loss.noise = GENERATORS[name]()
    return loss


class DrawsInCompute(HiddenInCompute):
    def compute(self, batch: Batch) -> Tensor:
        return batch.reduce(batch.rows["embeddings"].square().sum(1)) * torch.rand((), dtype=torch.float64)


class DropsInCompute(HiddenInCompute):
    def compute(self, batch: Batch) -> Tensor:
        return batch.reduce(nn.functional.dropout(batch.rows["embeddings"]).square().sum(1))


def of_closure() -> Callable[[Tensor, Tensor], Tensor]:
    power = 1.0 + dist.get_rank()
    return lambda z, labels: (z - z.mean(0)).abs().pow(power).sum() + 0 * labels.sum()


def of_partial() -> Callable[[Tensor, Tensor], Tensor]:
    return functools.partial(lambda z, labels, power: z.abs().pow(power).sum(), power=1.0 + dist.get_rank())


class Called:
    def __init__(self) -> None:
        self.power = 1.0 + dist.get_rank()

    def __call__(self, z: Tensor, labels: Tensor) -> Tensor:
        return z.abs().pow(self.power).sum() + 0 * labels.sum()


class Scaled(HiddenInCompute):
    """A parameter that meets local embeddings: right if shared, right after the mean, else a part of its gradient."""

    where = "before"

    def __post_init__(self) -> None:
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))

    def compute(self, batch: Batch) -> Tensor:
        weight = batch.shared(self.weight) if self.where == "shared" else self.weight
        rows = batch.rows["embeddings"].square()
        if self.where == "after":
            return (weight * batch.reduce(rows.sum(1))).sum()
        return batch.reduce((weight.sum() * rows).sum(1))


class LearnsSetting(HiddenInCompute):
    scale: Learnable = 1.0

    def compute(self, batch: Batch) -> Tensor:
        return batch.reduce(batch.settings.scale * batch.rows["embeddings"].square().sum(1))


class SharedScale(Scaled):
    where = "shared"


class ScaleAfter(Scaled):
    where = "after"


def a_parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(1, dtype=torch.float64))


LOSSES: dict[str, tuple[Callable[[], Any], str]] = {
    **{
        f"{holder} in {kind.__name__}": (functools.partial(hidden, kind, holder), words)
        for holder in HOLDERS
        for kind, words in ((HiddenInRows, "the same anchor"), (HiddenInCompute, "the same samples"))
    },
    "a class attribute": (functools.partial(hidden, OfClass, "a class attribute"), "the same anchor"),
    "a global": (functools.partial(hidden, OfModule, "a global"), "the same anchor"),
    **{name: (functools.partial(drawing, name), "the same anchor") for name in GENERATORS},
    "a function of a closure": (of_closure, "its last value came out differently"),
    "a partial of a function": (of_partial, "its last value came out differently"),
    "a call of an object": (Called, "its last value came out differently"),
    "torch.rand in compute": (DrawsInCompute, "its last value came out differently"),
    "dropout in compute": (DropsInCompute, "the same samples"),
    "a parameter before the mean": (Scaled, "batch.shared"),
    "a learnable setting before the mean": (lambda: LearnsSetting(scale=a_parameter()), "batch.shared"),
}
"""Losses that differ between ranks, or that ranks draw or differentiate apart, and words of the error."""

RIGHT: dict[str, Callable[[], Any]] = {
    "rows": HiddenInRows,
    "compute": HiddenInCompute,
    "a shared parameter": SharedScale,
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
