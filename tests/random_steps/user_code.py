"""Losses and settings that a user writes: with states, hooks, hidden numbers, private generators and unshared parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.loss_base.loss import Inputs, Loss

Function = Callable[[Tensor], Tensor]


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self) -> Tensor:
        self.calls += 1
        return 0.1 + 0.1 * self.calls


class Cooling(nn.Module):
    """A temperature that counts its calls in a plain attribute, and returns a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self) -> float:
        self.calls += 1
        return 0.1 + 0.9**self.calls


class Held(cz.RowLoss):
    """A row loss that computes with everything that an attribute can be."""

    def __post_init__(self) -> None:
        self.table = {"b": 1.0, "a": [0.5, torch.tensor(2.0, dtype=torch.float64)]}
        self.array = np.array([1.0, 2.0])
        self.options = SimpleNamespace(power=2.0)
        self.scale = torch.tensor(1.5, dtype=torch.float64)
        self._private = 0.25

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        factor = self.table["b"] + self.table["a"][0] + self.table["a"][1] + float(self.array.sum())
        factor = factor * self.options.power * self.scale + self._private
        return factor * (similarity * negative).sum(1), negative.any(1)


class Counting(cz.RowLoss):
    """A row loss that counts in a plain attribute how often it is asked."""

    def __post_init__(self) -> None:
        self.asked = 0

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        self.asked += 1
        return self.asked * (similarity * negative).sum(1), negative.any(1)


class Plain:
    def __init__(self, factor: float) -> None:
        self.factor = factor


class Slotted:
    __slots__ = ("factor",)

    def __init__(self, factor: float) -> None:
        self.factor = factor


def times(x: Tensor, of: Any) -> Tensor:
    return of.factor * x


def times_global(x: Tensor) -> Tensor:
    return factor * x  # noqa: F821 - in the globals of a copy


HOLDERS: dict[str, Callable[[float], Function]] = {
    "an object with slots": lambda x: functools.partial(times, of=Slotted(x)),
    "a closure": lambda value: lambda x: value * x,
    "a global": lambda x: FunctionType(times_global.__code__, {"factor": x}),
}
"""Where a number hides from ranks that read attributes."""


def of_torch() -> Function:
    generator = torch.Generator().manual_seed(0)
    return lambda x: torch.rand(x.shape, generator=generator, dtype=x.dtype)


def of_numpy() -> Function:
    generator = np.random.default_rng(0)
    return lambda x: torch.from_numpy(generator.random(tuple(x.shape)))


def forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.rand_like(x)


GENERATORS: dict[str, Callable[[], Function]] = {
    "torch.Generator": of_torch,
    "numpy.random.default_rng": of_numpy,
    "fork_rng": lambda: forked,
    "torch.rand": lambda: torch.rand_like,
}
"""Random numbers that ranks cannot synchronise; of the last that is so where a loss computes its own part."""


class HidesInRows(cz.RowLoss):
    def __post_init__(self) -> None:
        self.hidden = {name: make(1.0) for name, make in HOLDERS.items()}
        self.noise: Function = torch.zeros_like

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        for scaled in self.hidden.values():
            similarity = scaled(similarity)
        return ((similarity + self.noise(similarity)) * negative).exp().sum(1).log(), negative.any(1)


class HidesInCompute(Loss):
    """Its parameter meets embeddings in the mean over samples, where ``batch.shared`` makes its gradient whole."""

    def __post_init__(self) -> None:
        self.hidden = {name: make(1.0) for name, make in HOLDERS.items()}
        self.noise: Function = torch.zeros_like
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
        self.shares: Literal["yes", "no"] = "yes"

    def inputs(self, embeddings: Tensor, labels: Tensor) -> Inputs:
        return Inputs.of({"embeddings": embeddings, "labels": labels})

    def compute(self, batch: Batch) -> Tensor:
        weight = batch.shared(self.weight) if self.shares == "yes" else self.weight
        z = batch.rows["embeddings"]
        similarity = z @ batch.gather_detached(z).detach().T
        for scaled in self.hidden.values():
            similarity = scaled(similarity)
        similarity = similarity + self.noise(similarity)
        return batch.reduce(similarity.tanh().sum(1) + weight.sum() * z.square().sum(1))


class ScaleAfter(HidesInCompute):
    def compute(self, batch: Batch) -> Tensor:
        return (self.weight * batch.reduce(batch.rows["embeddings"].square().sum(1))).sum()


class OwnForward(cz.SupCon):
    """A subclass that computes the loss twice, also of other embeddings, and counts its calls."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, z: Any, labels: Tensor | None = None) -> Tensor:
        self.calls += 1
        return self.calls * super().forward(z - z.mean(0), labels) + super().forward(z, labels)


class OwnCall(cz.SupCon):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def __call__(self, *args: Any, **named: Any) -> Tensor:
        self.calls += 1
        return self.calls * super().__call__(*args, **named)


class EmptyBank(nn.Module):
    """As lightly's losses are without a memory: buffers and parameters of no numbers, and a pointer that nothing sets."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.empty(0))
        self.register_buffer("pointer", torch.tensor([7 + 10**9 * cz.World.of().rank]))
        self.queue = nn.Parameter(torch.empty(0, 4))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(first @ second.T, torch.arange(len(first)))


class Bank(nn.Module):
    """As lightly's losses with a memory: what its buffers hold is left to chance until a first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        rank = cz.World.of().rank
        self.register_buffer("bank", torch.full((4, 4), 1e3 * (1 + rank), dtype=torch.float64))
        self.register_buffer("pointer", torch.tensor([10**6 + rank]))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        if self.pointer > 100:
            self.pointer.zero_()
            self.bank.zero_()
        self.pointer += 1
        self.bank[self.pointer % 4] = embeddings.detach().mean(0)
        return (embeddings @ self.bank.T).square().sum() + 0 * labels.sum()


def closure() -> Callable[..., Tensor]:
    weights, power = {"all": torch.tensor([1.0, 2.0], dtype=torch.float64)}, 2.0

    def spread(z: Tensor, labels: Tensor) -> Tensor:
        distances = (z[:, None] - z[None]).square().sum(2)
        return (weights["all"].sum() * distances**power * (labels[:, None] != labels)).mean()

    return spread


def scaled(z: Tensor, labels: Tensor, scale: float = 1.0, power: Any = 2.0) -> Tensor:
    return scale * ((z - z.mean(0)) ** power).sum() + 0 * labels.sum()


class Called(Plain):
    def __call__(self, z: Tensor, labels: Tensor) -> Tensor:
        return scaled(z, labels, self.factor)


def patched() -> cz.SupCon:
    loss = cz.SupCon()
    forward = loss.forward
    loss.forward = lambda z, labels=None: forward(z - z.mean(0), labels)
    return loss


def hooked(kind: str, hook: Callable[..., Any]) -> cz.SupCon:
    loss = cz.SupCon()
    getattr(loss, f"register_{kind}_hook")(hook)
    return loss


def centred(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return args[0] - args[0].mean(0), *args[1:]


def doubled(module: nn.Module, of_inputs: Sequence[Tensor | None], of_outputs: Any) -> tuple[Tensor | None, ...]:
    return tuple(None if x is None else 2 * x for x in of_inputs)


def cooling() -> cz.WeightedSum:
    inner = cz.InfoNCE(temperature=Cooling())
    return cz.WeightedSum([cz.InfoNCE(temperature=Cooling()), cz.Matryoshka(inner, (1, 4))])


LABELLED: dict[str, Callable[[], Any]] = {
    "SupCon, tensor": lambda: cz.SupCon(temperature=torch.tensor(0.2, dtype=torch.float64)),
    "Held": Held,
    "hides in rows": HidesInRows,
    "hides in compute": HidesInCompute,
    "a parameter after the mean": ScaleAfter,
    "closure": closure,
    "partial": lambda: functools.partial(scaled, scale=2.0, power=torch.tensor(2.0)),
    "object": lambda: Called(1.0),
    "a sum of labelled losses": lambda: cz.WeightedSum(
        [cz.SupCon(temperature=cz.LearnableTemperature()), cz.Triplet()]
    ),
    "Triplet, learnt": lambda: cz.Triplet(margin=cz.LearnableTemperature(0.2)),
}
PAIRED: dict[str, Callable[[], Any]] = {
    "NTXent, tensor": lambda: cz.NTXent(temperature=torch.tensor(0.2, dtype=torch.float64)),
    "an empty bank": EmptyBank,
    "VICReg": cz.VICReg,
}
STATEFUL: dict[str, Callable[[], Any]] = {
    "SupCon, annealed": lambda: cz.SupCon(temperature=Annealed()),
    "SINCERE, annealed": lambda: cz.SINCERE(temperature=Annealed()),
    "NormalizedSoftmax, annealed": lambda: cz.NormalizedSoftmax(5, 4, temperature=Annealed()),
    "Triplet, annealed": lambda: cz.Triplet(margin=Annealed()),
    "WeightedSum, annealed": lambda: cz.WeightedSum([cz.SupCon(temperature=Annealed()), cz.Triplet()]),
    "a labelled memory": lambda: cz.CrossBatchMemory(cz.SupCon(temperature=cz.LearnableTemperature()), 16, 4),
    "a labelled memory, annealed": lambda: cz.CrossBatchMemory(cz.SupCon(temperature=Annealed()), 16, 4),
    "a counter": Counting,
    "a bank": Bank,
    "a forward of its own": OwnForward,
    "a call of its own": OwnCall,
    "a patched forward": patched,
    "a pre-hook": lambda: hooked("forward_pre", centred),
    "a hook": lambda: hooked("forward", lambda module, args, value: value * args[0].square().mean()),
    "a backward hook": lambda: hooked("full_backward", doubled),
    "a backward pre-hook": lambda: hooked("full_backward_pre", lambda module, gradients: (2 * gradients[0],)),
    "a forward of its own in a sum": lambda: cz.WeightedSum([OwnForward(), cz.Triplet()]),
}
"""Labelled losses of user code that moves a state, or sees the embeddings."""
STATEFUL_PAIRS: dict[str, Callable[[], Any]] = {
    "DCL, annealed": lambda: cz.DCL(temperature=Annealed()),
    "NTXent, annealed": lambda: cz.NTXent(temperature=Annealed()),
    "MNRL, annealed": lambda: cz.MNRL(temperature=Annealed()),
    "Clip, annealed": lambda: cz.Clip(temperature=Annealed()),
    "a sum, cooling": cooling,
}
