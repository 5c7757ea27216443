"""A training in which one rank alone changes something: its loss, a setting, a hook, a number, what surrounds the call."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.testing.interventions import splitting

WIDTH, TOTAL = 5, 8
SHARDS = ((3, 5), (8, 0), (1, 7), (4, 4), (5, 3))


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
        return 0.9**self.calls


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


class Hidden(cz.RowLoss):
    """A row loss that computes with what ranks cannot read."""

    def __post_init__(self) -> None:
        self.options = Namespace(power=2.0, inner=SimpleNamespace(scale=1.5))
        self.noise: Callable[[Tensor], Tensor] = torch.zeros_like

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        similarity = self.options.inner.scale * similarity.abs() ** self.options.power + self.noise(similarity)
        return (similarity * negative).sum(1), negative.any(1)


def of_closure() -> Callable[..., Tensor]:
    weights, power = {"all": torch.tensor([1.0, 2.0], dtype=torch.float64)}, 2.0

    def spread(z: Tensor, labels: Tensor) -> Tensor:
        return (
            weights["all"].sum() * (z[:, None] - z[None]).square().sum(2) ** power * (labels[:, None] != labels)
        ).mean()

    return spread


def scaled(z: Tensor, labels: Tensor, scale: float = 1.0, power: Any = 2.0) -> Tensor:
    return scale * ((z - z.mean(0)) ** power).sum() + 0 * labels.sum()


class Called:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, z: Tensor, labels: Tensor) -> Tensor:
        return scaled(z, labels, self.scale)


class Counting(cz.RowLoss):
    """A row loss that counts in a plain attribute how often it is asked."""

    def __post_init__(self) -> None:
        self.asked = 0

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        self.asked += 1
        return self.asked * (similarity * negative).sum(1), negative.any(1)


class OwnForward(cz.SupCon):
    """A subclass that computes the loss twice, also of other embeddings, and counts its calls."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, z: Any, labels: Tensor | None = None) -> Tensor:
        self.calls += 1
        return self.calls * super().forward(z - z.mean(0), labels) + super().forward(z, labels)


class EmptyBank(nn.Module):
    """As lightly's losses are without a memory: buffers and parameters of no numbers, and a pointer that nothing sets."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.empty(0))
        self.register_buffer("pointer", torch.tensor([7 + 10**9 * cz.World.of().rank]))
        self.queue = nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(first @ second.T, torch.arange(len(first)))


class OwnCall(cz.SupCon):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def __call__(self, *args: Any, **named: Any) -> Tensor:
        self.calls += 1
        return self.calls * super().__call__(*args, **named)


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


def spectral() -> nn.Module:
    """A setting with a parametrisation that keeps vectors as buffers."""

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))

        def forward(self) -> Tensor:
            return self.layer.weight.square().mean() + 0.1

    return Norm()


def learnt(value: float = 0.2) -> cz.LearnableTemperature:
    return cz.LearnableTemperature(value)


LABELLED: dict[str, Callable[[], Any]] = {
    "SupCon": lambda: cz.SupCon(temperature=learnt()),
    "SupCon, tensor": lambda: cz.SupCon(temperature=torch.tensor(0.2, dtype=torch.float64)),
    "Held": Held,
    "Hidden": Hidden,
    "ArcFace": lambda: cz.ArcFace(4, WIDTH),
    "Triplet": lambda: cz.Triplet(margin=learnt()),
    "WeightedSum": lambda: cz.WeightedSum([cz.SupCon(temperature=learnt()), cz.Triplet()]),
    "CrossBatchMemory": lambda: cz.CrossBatchMemory(cz.SupCon(temperature=learnt()), 16, WIDTH),
    "closure": of_closure,
    "partial": lambda: functools.partial(scaled, scale=2.0, power=torch.tensor(2.0)),
    "object": lambda: Called(1.0),
}
PAIRED: dict[str, Callable[[], Any]] = {
    "NTXent": lambda: cz.NTXent(temperature=learnt()),
    "NTXent, tensor": lambda: cz.NTXent(temperature=torch.tensor(0.2, dtype=torch.float64)),
    "Clip": lambda: cz.Clip(temperature=learnt()),
    "SigLIP": lambda: cz.SigLIP(),
    "an empty bank": EmptyBank,
    "VICReg": lambda: cz.VICReg(),
}
STATEFUL: dict[str, Callable[[], Any]] = {
    "SupCon, annealed": lambda: cz.SupCon(temperature=Annealed()),
    "SINCERE, annealed": lambda: cz.SINCERE(temperature=Annealed()),
    "NormalizedSoftmax, annealed": lambda: cz.NormalizedSoftmax(4, WIDTH, temperature=Annealed()),
    "Triplet, annealed": lambda: cz.Triplet(margin=Annealed()),
    "SupCon, spectral norm": lambda: cz.SupCon(temperature=spectral()),
    "WeightedSum, annealed": lambda: cz.WeightedSum([cz.SupCon(temperature=Annealed()), cz.Triplet()]),
    "CrossBatchMemory, annealed": lambda: cz.CrossBatchMemory(cz.SupCon(temperature=Annealed()), 16, WIDTH),
    "a counter": Counting,
    "a forward of its own": OwnForward,
    "a call of its own": OwnCall,
    "a patched forward": patched,
    "a pre-hook": lambda: hooked("forward_pre", centred),
    "a hook": lambda: hooked("forward", lambda module, args, value: value * args[0].std()),
    "a backward hook": lambda: hooked("full_backward", doubled),
    "a backward pre-hook": lambda: hooked("full_backward_pre", lambda module, gradients: (2 * gradients[0],)),
    "a forward of its own in a sum": lambda: cz.WeightedSum([OwnForward(), cz.Triplet()]),
}
"""User code that moves a state, or sees the embeddings: labelled, too."""
STATEFUL_PAIRS: dict[str, Callable[[], Any]] = {
    "DCL, annealed": lambda: cz.DCL(temperature=Annealed()),
    "NTXent, annealed": lambda: cz.NTXent(temperature=Annealed()),
    "MNRL, annealed": lambda: cz.MNRL(temperature=Annealed()),
    "Clip, annealed": lambda: cz.Clip(temperature=Annealed()),
    "a sum, cooling": lambda: cz.WeightedSum(
        [cz.InfoNCE(temperature=Cooling()), cz.Matryoshka(cz.InfoNCE(temperature=Cooling()), (1, WIDTH))]
    ),
}
HIDING = frozenset({"Hidden", "closure", "partial", "object"})  # hold numbers that ranks cannot read
LABELLED |= STATEFUL
LOSSES = LABELLED | PAIRED | STATEFUL_PAIRS


def made(name: str) -> Any:
    torch.manual_seed(0)
    loss = LOSSES[name]()
    return loss.double() if isinstance(loss, nn.Module) else loss


def batch(name: str, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    z = torch.randn(2, TOTAL, WIDTH, dtype=torch.float64, generator=generator)
    return [z[0], torch.arange(TOTAL) % 3] if name in LABELLED else [z[0], z[1]]


class Outcome(NamedTuple):
    value: Tensor | None = None
    rows: Sequence[Tensor] = ()
    parameters: Sequence[Tensor] = ()
    refused: str = ""


def parameters_of(loss: Any) -> list[nn.Parameter]:
    return [x for x in loss.parameters() if x.requires_grad] if isinstance(loss, nn.Module) else []


def one_step(loss_fn: Callable[..., Tensor], rows: list[Tensor], learns: list[nn.Parameter], size: int = 1) -> Outcome:
    rows = [x.clone().requires_grad_() if x.is_floating_point() else x for x in rows]
    leaves = [x for x in rows if x.requires_grad]
    value = loss_fn(*rows)
    gradients = torch.autograd.grad(value, [*leaves, *learns], allow_unused=True, materialize_grads=True)
    with torch.no_grad():
        for x, gradient in zip(learns, gradients[len(leaves) :], strict=True):
            x -= 0.01 * gradient
    of_rows = [gradient / size for gradient in gradients[: len(leaves)]]
    return Outcome(value.detach(), of_rows, list(gradients[len(leaves) :]))


def largest_error(ranks: Sequence[Outcome], whole: Outcome) -> float:
    """Of a step: of the value, of the embeddings' gradients and of each rank's gradients of parameters."""
    assert whole.value is not None
    errors = [x.value - whole.value for x in ranks if x.value is not None]
    errors += [torch.cat([x.rows[i] for x in ranks]) - gradient for i, gradient in enumerate(whole.rows)]
    errors += [x.parameters[i] - gradient for x in ranks for i, gradient in enumerate(whole.parameters)]
    return max(float(x.abs().max() / (1 + x.abs().max())) for x in errors if x.numel())


def alone(name: str) -> list[Outcome]:
    loss = made(name)
    return [one_step(loss, batch(name, step), parameters_of(loss)) for step in range(len(SHARDS))]


def trained(
    name: str,
    wrapper: cz.DistributedLoss,
    *,
    splits: bool,
    at: int,
    change: Callable[[], Any],
    of_rows: Callable[[list[Tensor]], list[Tensor]] = lambda rows: rows,
) -> list[Outcome]:
    """The training on this rank, which ends with what is refused; the last rank changes something before a step."""
    rank, size, outcomes = dist.get_rank(), dist.get_world_size(), []
    with splitting(always=splits):
        for step, shards in enumerate(SHARDS):
            rows = [x.split(_among(shards, size))[rank] for x in batch(name, step)]
            rows = [x.clone().requires_grad_() if x.is_floating_point() else x for x in rows]
            if step == at and rank == size - 1:
                change()
                rows = of_rows(rows)
            try:
                outcomes.append(one_step(wrapper, rows, parameters_of(wrapper.loss), size))
            except (
                ValueError,
                TypeError,
                RuntimeError,
            ) as error:  # the last is autograd's, where no rank has a gradient
                return [*outcomes, Outcome(refused=f"{type(error).__name__}: {error}")]
    return outcomes


def _among(of_two: tuple[int, int], size: int) -> tuple[int, ...]:
    """The same embeddings on more ranks: the second rank's are split."""
    first, second = of_two
    return (first, second) if size == 2 else (first, second // 2, second - second // 2)


def on_ranks(name: str, change: Callable[[Any], Any], at: int, *, splits: bool) -> list[Outcome]:
    loss = made(name)
    return trained(name, cz.DistributedLoss(loss), splits=splits, at=at, change=lambda: change(loss))
