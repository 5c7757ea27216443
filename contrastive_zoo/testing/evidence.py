"""The evidence of a diagnosis: what W ranks computed, relative to one process. Check and audit collect it."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from contrastive_zoo.metrics.figures import WIDTH

CLOSE = 1e-6  # largest relative difference of a ratio from the one that a mistake predicts; other mistakes differ more
ZERO = 1e-12  # norm of a vector that is rounding, where that of one process is zero

# Where a training goes wrong first: parameters before the first step, a rank that raises or hangs, the value on equal
# shards, only the gradient there, only unequal shards, or a promise outside the contract
Stage = Literal["start", "failure", "value", "gradient", "uneven", "other"]


class Ratio(NamedTuple):
    """A vector x against a reference y."""

    ratio: float  # r = ⟨x, y⟩ / ⟨y, y⟩
    cosine: float  # of the angle between x and y
    error: float  # ‖x − y‖ / ‖y‖
    rest: float = 0.0  # ‖x − r y‖ / ‖y‖, the part of the error that is no factor

    @classmethod
    def between(cls, x: Tensor, y: Tensor) -> "Ratio":
        if x.shape != y.shape:
            return cls(math.nan, math.nan, math.nan, math.nan)
        norms = float(x.norm()), float(y.norm())
        if norms[1] == 0:
            return cls(1.0, 1.0, 0.0) if norms[0] <= ZERO else cls(math.inf, 0.0, math.inf, math.inf)
        cosine = float(x @ y) / (norms[0] * norms[1]) if norms[0] else 0.0
        ratio = float(x @ y) / norms[1] ** 2
        return cls(ratio, cosine, float((x - y).norm()) / norms[1], float((x - ratio * y).norm()) / norms[1])

    @property
    def norms(self) -> float:
        return math.hypot(self.ratio, self.rest)

    def is_scaled(self, factor: float, tolerance: float = CLOSE) -> bool:
        bound = tolerance * max(1.0, abs(factor))
        return abs(self.ratio - factor) <= bound and self.rest <= bound

    def __str__(self) -> str:
        return f"×{self.norms:.3g}, cosine {self.cosine:.3g}"


def flat(tensors: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    """Return these tensors as one vector in float64; a missing one is a sketch of zeros."""
    zero = torch.zeros(WIDTH, dtype=torch.float64)
    return torch.cat([tensors.get(name, zero).double().flatten() for name in names] or [zero])


class Gradients(NamedTuple):
    """The gradients of a group of parameters, relative to one process."""

    ranks: tuple[Ratio, ...]  # of each rank, as a step leaves it; of a loss, that after the gradient all-reduce
    mean: Ratio  # of their mean
    tolerance: float = CLOSE

    @classmethod
    def between(cls, ranks: Sequence[Tensor], expected: Tensor, tolerance: float = CLOSE) -> "Gradients":
        mean = torch.stack(list(ranks)).mean(0)
        return cls(tuple(Ratio.between(x, expected) for x in ranks), Ratio.between(mean, expected), tolerance)

    def is_scaled(self, factor: float) -> bool:
        return all(x.is_scaled(factor, self.tolerance) for x in self.ranks)

    @property
    def has_direction(self) -> bool:
        return all(abs(x.cosine - 1) <= self.tolerance for x in self.ranks)

    @property
    def lack_reduction(self) -> bool:
        """Whether the ranks' gradients are not right, and their mean is."""
        return not self.is_scaled(1.0) and self.mean.is_scaled(1.0, self.tolerance)

    def __str__(self) -> str:
        return str(max(self.ranks, key=lambda x: x.error))


def is_scaled(compared: Ratio | Gradients | None, factor: float) -> bool:
    """Return whether gradients are ``factor`` times those of one process; what was not compared has every factor."""
    return compared is None or compared.is_scaled(factor)


@dataclass(frozen=True)
class Comparison:
    """One batch on W ranks, compared with one process. None stands for what was not compared."""

    values: Tensor  # of the losses on each rank, [W, losses]
    expected: Tensor  # of the losses in one process, [losses]
    encoder: Gradients | None
    parameters: Gradients | None  # the loss's own
    equal_parameters: bool = True  # whether all ranks hold the same gradient of the loss's own parameters
    tolerance: float = CLOSE  # of a right value
    shards: tuple[int, ...] = ()

    @property
    def world_size(self) -> int:
        return len(self.values)

    def near(self, x: Tensor, y: Tensor) -> bool:
        return all(Ratio.between(of_rank, y).error <= self.tolerance for of_rank in torch.atleast_2d(x))

    def has_values(self, factor: float) -> bool:
        return self.near(self.values, factor * self.expected)

    def has_mean(self, factor: float) -> bool:
        return self.near(self.values.mean(0), factor * self.expected)

    @property
    def equal_values(self) -> bool:
        return self.near(self.values, self.values[0])

    def is_scaled(self, encoder: float, parameters: float) -> bool:
        return is_scaled(self.encoder, encoder) and is_scaled(self.parameters, parameters)

    def __str__(self) -> str:
        value = self.expected[:1].sum()
        values = ", ".join(f"×{x / value:.3g}" if value else f"{x:.3g}" for x in self.values[:, :1].flatten())
        named = {"values": values, "encoder gradient": self.encoder}
        named |= {"gradient of the loss's own parameters": self.parameters}
        shards = f", shards {list(self.shards)}" if self.shards else ""
        return f"on W={self.world_size}{shards}: {'; '.join(f'{name} {x}' for name, x in named.items() if x)}"


class Evidence:
    """What the signatures of :mod:`contrastive_zoo.testing.mistakes` read; what was not measured is as in a right loss."""

    stages: Sequence[Stage] = ()  # where the training goes wrong, in the order in which their signatures are tried
    comparisons: Sequence[Comparison] = ()  # of batches on equal shards, one for each W
    uneven: Comparison | None = None  # of a batch on unequal shards
    one_sided: Comparison | None = None  # of a batch whose samples are all on the last rank
    option: str | None = None  # grad_reduction of the loss
    trainer: str = "mean"  # how the gradients of a loss are reduced
    equal_parameters = equal_tensors = True  # whether ranks start with the same ones of the loss
    is_training = False  # whether the evidence is of a training that was audited
    broken: frozenset[str] = frozenset()  # names of the broken invariants
    failure: str | None = None  # "hang", "no answer", "raises" or "uneven shards" if a rank fails on some batch
    draws = False  # whether random numbers are drawn, from any generator
    calls_in_backward = False  # whether a collective of embeddings or gradients is called in the loss's backward pass
    calls: Callable[[str], bool]  # whether a collective of such a name is called in the forward pass
    confirms: Callable[[str], bool]  # whether a change of the samples of some ranks shows that a mistake is made
    # Only of a loss: no mistake of a training is known by them
    changes: Callable[[str], bool | None]  # whether a change of samples changes the value of a rank that keeps its own
    right_after: Callable[[str], bool]  # whether ranks return the value of one process after such a change

    def every(self, holds: Callable[[Comparison], bool]) -> bool:
        return all(map(holds, self.comparisons))

    @property
    def has_parameters(self) -> bool:
        return self.every(lambda x: x.parameters is not None)

    def __str__(self) -> str:
        probes = [x for x in (self.uneven, self.one_sided) if x and not x.has_values(1.0)]
        return ". ".join(map(str, [*self.comparisons, *probes])) or "no probe returned a value on several processes"


def is_near(x: float, y: float, tolerance: float = CLOSE) -> bool:
    return abs(x - y) <= tolerance * max(1.0, abs(y))


# A tolerance is this often the largest difference between repetitions, plus this often the unit of rounding
NOISE_FACTOR, ROUNDING_FACTOR = 10.0, 100.0
# Where a step rounds to 16 bits, all parameters change by up to half a unit of these, as much as all that is rounded
LOW_NOISE_FACTOR = 3.0


def noisy(x: Tensor, generator: torch.Generator, eps: float) -> Tensor:
    if not x.is_floating_point():
        return x
    change = torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x.device) * 2 - 1
    return (x * (1 + eps / 2 * change)).to(x.dtype)


def tolerance(noise: Sequence[float], eps: float, floor: float = 0.0, unit: float = 0.0) -> float:
    """Return the largest difference of a right result; ``unit`` is the unit of rounding to 16 bits, 0 without it."""
    factor = LOW_NOISE_FACTOR if unit else NOISE_FACTOR
    return max(factor * max(noise, default=0.0), floor, unit) + ROUNDING_FACTOR * eps
