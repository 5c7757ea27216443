"""Losses and settings that a user writes: with states, hooks, hidden numbers, private generators and unshared parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.loss_base.loss import Inputs, Loss
from tests.helpers import later

Function = Callable[[Tensor], Tensor]


def number(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


class Annealed(nn.Module):
    """A temperature that counts its calls, in a buffer or in a plain attribute."""

    def __init__(self, *, plain: bool = False) -> None:
        super().__init__()
        self.calls: Any = 0 if plain else nn.Buffer(number(0))

    def forward(self) -> Any:
        self.calls += 1
        return 0.1 + 0.1 * self.calls


class Held(cz.RowLoss):
    """A row loss that computes with everything that an attribute can be, and knows its rank."""

    def __post_init__(self) -> None:
        self.table = {"b": 1.0, "a": [0.5, number(2)]}
        self.array, self.options, self.scale = np.array([1.0, 2.0]), SimpleNamespace(power=2.0), number(1.5)
        self._private, self.rank = 0.25, cz.World.of().rank

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        factor = self.table["b"] + self.table["a"][0] + self.table["a"][1] + float(self.array.sum())
        factor = factor * self.options.power * self.scale + self._private
        return factor * (similarity * negative).sum(1), negative.any(1)


def times(factor: float) -> Function:
    """Hide a number from ranks that read attributes."""
    return lambda x: factor * x


def of_a_generator() -> Function:
    """Return random numbers that ranks cannot synchronise."""
    generator = torch.Generator().manual_seed(0)
    return lambda x: torch.rand(x.shape, generator=generator, dtype=x.dtype)


class OfAGenerator:
    """Return random numbers of a generator that a copy of the loss holds, too."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.from_numpy(self.generator.random(x.shape)).to(x.dtype)


class Hides:
    def __post_init__(self) -> None:
        self.hidden, self.noise = {"a closure": times(1.0)}, torch.zeros_like

    def changed(self, similarity: Tensor) -> Tensor:
        similarity = self.hidden["a closure"](similarity)
        return similarity + self.noise(similarity)


class HidesInRows(Hides, cz.RowLoss):
    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        return (self.changed(similarity) * negative).exp().sum(1).log(), negative.any(1)


class HidesInCompute(Hides, Loss):
    """Its parameter meets embeddings in the mean over samples, where ``batch.shared`` makes its gradient whole."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
        self.shares: Literal["yes", "no"] = "yes"

    def inputs(this, embeddings: Tensor, labels: Tensor) -> Inputs:  # noqa: N805 - an object has any name
        return Inputs.of({"embeddings": embeddings, "labels": labels})

    def compute(self, batch: Batch) -> Tensor:
        weight = batch.shared(self.weight) if self.shares == "yes" else self.weight
        z = batch.rows["embeddings"]
        similarity = self.changed(z @ batch.gather_detached(z).detach().T)
        return batch.reduce(similarity.tanh().sum(1) + weight.sum() * z.square().sum(1))


class ScaleAfter(HidesInCompute):
    def compute(self, batch: Batch) -> Tensor:
        return (self.weight * batch.reduce(batch.rows["embeddings"].square().sum(1))).sum()


class OwnForward(cz.SupCon):
    """A subclass that computes the loss twice, also of other embeddings, and counts its calls."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.calls = nn.Buffer(number(0))

    def forward(self, z: Any, labels: Tensor | None = None) -> Tensor:
        self.calls += 1
        return self.calls * super().forward(z - z.mean(0), labels) + super().forward(z, labels)


class OwnCall(OwnForward):
    forward = cz.SupCon.forward

    def __call__(self, *args: Any, **named: Any) -> Tensor:
        self.calls += 1
        return self.calls * super().__call__(*args, **named)


class Bank(nn.Module):
    """As lightly's losses: its memory is empty, and the pointer left to chance, until a first forward pass, or always."""

    def __init__(self, *, fills: bool = True) -> None:
        super().__init__()
        self.bank, self.pointer = nn.Buffer(torch.empty(0)), nn.Buffer(torch.tensor([10**6 + cz.World.of().rank]))
        self.queue, self.fills = nn.Parameter(torch.empty(0, 4)), fills

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        if not self.fills:
            return scaled(embeddings, labels)
        if not self.bank.numel():
            self.pointer.zero_()
            self.bank = embeddings.new_zeros(4, 4)
        self.pointer += 1
        self.bank[self.pointer % 4] = embeddings.detach().mean(0)
        return (embeddings @ self.bank.T).square().sum() + 0 * labels.sum()


def closure() -> Callable[..., Tensor]:
    weights, power, rank = {"all": torch.tensor([1.0, 2.0], dtype=torch.float64)}, 2.0, cz.World.of().rank

    def spread(z: Tensor, labels: Tensor) -> Tensor:
        distances = (z[:, None] - z[None]).square().sum(2) + 0 * rank
        return (weights["all"].sum() * distances**power * (labels[:, None] != labels)).mean()

    return spread


def scaled(z: Tensor, labels: Tensor, scale: float = 1.0, power: Any = 2.0) -> Tensor:
    return scale * ((z - z.mean(0)) ** power).sum() + 0 * labels.sum()


def centred(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return args[0] - args[0].mean(0), *args[1:]


def doubled(module: nn.Module, of_inputs: Sequence[Tensor | None], *_: Any) -> tuple[Tensor | None, ...]:
    return tuple(None if x is None else 2 * x for x in of_inputs)


HOOKS: dict[str, Callable[..., Any]] = {
    "forward_pre": centred,
    "forward": lambda module, args, value: value * args[0].square().mean(),
    "full_backward": doubled,
    "full_backward_pre": doubled,
}


def with_hook(kind: str) -> cz.SupCon:
    loss = cz.SupCon()
    getattr(loss, f"register_{kind}_hook")(HOOKS[kind])
    return loss


def counting() -> cz.WeightedSum:
    losses = [cz.InfoNCE(temperature=Annealed(plain=True)) for _ in range(2)]
    return cz.WeightedSum([losses[0], cz.Matryoshka(losses[1], (1, 4))])


LABELLED: dict[str, Callable[[], Any]] = {
    "SupCon, tensor": lambda: cz.SupCon(temperature=number(0.2)),
    "Held": Held,
    "hides in rows": HidesInRows,
    "hides in compute": HidesInCompute,
    "a parameter after the mean": ScaleAfter,
    "closure": closure,
    "partial": lambda: functools.partial(scaled, scale=2.0, power=torch.tensor(2.0)),
    "an empty bank": lambda: Bank(fills=False),
}
STATEFUL: dict[str, Callable[[], Any]] = {
    "SupCon, annealed": lambda: cz.SupCon(temperature=Annealed()),
    "NormalizedSoftmax, annealed": lambda: cz.NormalizedSoftmax(5, 4, temperature=Annealed()),
    "Triplet, annealed": lambda: cz.Triplet(margin=Annealed()),
    "WeightedSum, annealed": lambda: cz.WeightedSum([cz.SupCon(temperature=Annealed()), cz.Triplet()]),
    "a labelled memory, annealed": lambda: cz.CrossBatchMemory(cz.SupCon(temperature=Annealed()), 16, 4),
    "a bank": Bank,
    "a forward of its own": OwnForward,
    "a call of its own": OwnCall,
    **{kind: functools.partial(with_hook, kind) for kind in HOOKS},
    "a patched forward": lambda: later(cz.SupCon(), forward=lambda z, labels: cz.SupCon()(z - z.mean(0), labels)),
    "a forward of its own in a sum": lambda: cz.WeightedSum([OwnForward(), cz.Triplet()]),
}
"""Labelled losses of user code that moves a state, or sees the embeddings."""
STATEFUL_PAIRS: dict[str, Callable[[], Any]] = {
    "NTXent, annealed": lambda: cz.NTXent(temperature=Annealed()),
    "MNRL, annealed": lambda: cz.MNRL(temperature=Annealed()),
    "Clip, annealed": lambda: cz.Clip(temperature=Annealed()),
    "a sum, counting": counting,
}
