"""One step of all ranks beside the same step of one process: vectors, and the noise of right ones."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from contrastive_zoo.testing.auditing.records import Record, Sketches, Step
from contrastive_zoo.testing.auditing.rerun import Setting
from contrastive_zoo.testing.evidence import Ratio
from contrastive_zoo.testing.noise import NOISE_FACTOR, ROUNDING_FACTOR, tolerance

LOW_NOISE_FACTOR = 3.0
"""The factor of the noise under autocast: there all parameters change by up to half a unit of the 16 bits, as much as all
that is rounded to these."""

REPETITIONS = 2
"""Reruns with changes of up to half a unit of rounding, from which the tolerance is derived."""

Vector = Callable[[Step], Tensor]
"""Returns a quantity of a step as one vector."""

RunAgain = Callable[[Setting], Record]
"""Runs the training in one process."""


class Reruns:
    """The runs in one process, each once; the noise is measured only where a difference is above rounding."""

    def __init__(self, run: RunAgain, records: Sequence[Record]) -> None:
        self._run, self._done = run, dict[Setting, Record]()
        self.unit = max((x.low for record in records for x in record.steps), default=0.0)

    def __call__(self, setting: Setting) -> Record:
        if setting not in self._done:
            self._done[setting] = self._run(setting)
        return self._done[setting]

    @property
    def noisy(self) -> list[Record]:
        return [self(Setting(noise=seed, unit=self.unit)) for seed in range(REPETITIONS)]


class StepEvidence:
    """One step of all ranks, and the same step of one process."""

    def __init__(self, index: int, records: Sequence[Record], reruns: Reruns, reason: str = "") -> None:
        self.index, self.records, self.reruns, self.reason = index, records, reruns, reason
        self.ranks = [x.steps[index] for x in records]
        self.follows_difference = False  # whether an earlier step differed, so that this one starts from another state
        self.world_size, self.eps = len(records), records[0].eps or torch.finfo(torch.float32).eps
        self.one = self.of(Setting()) if not reason else None
        counts = {len(x.values) for x in (*self.ranks, *([self.one] if self.one else []))}
        if self.one is None:
            self.reason = reason or "the run in one process ended before this step"
        elif len(counts) > 1:
            self.one, self.reason = None, "the ranks and one process computed different numbers of losses in one step"

    def of(self, setting: Setting) -> Step | None:
        """Return this step of a rerun, None if that ended before."""
        steps = self.reruns(setting).steps
        return steps[self.index] if self.index < len(steps) else None

    @property
    def problem(self) -> str:
        """Why a difference may be one of random numbers."""
        return self.reruns(Setting()).problem if self.one is not None else ""

    @cached_property
    def noisy(self) -> list[Step]:
        return [x.steps[self.index] for x in self.reruns.noisy if self.index < len(x.steps)]

    def values(self, step: Step) -> Tensor:
        return torch.tensor(step.values, dtype=torch.float64)

    def names(self, group: str) -> list[str]:
        """Return the trained parameters of the encoder or of the loss."""
        trained = {name for x in self._all for name in (*x.gradients, *x.optimized)}
        return sorted(name for name, x in self.records[0].groups.items() if x == group and name in trained)

    @property
    def other_parameters(self) -> list[str]:
        """The parameters that no optimizer trains, as those of a teacher."""
        trained = {*self.names("encoder"), *self.names("loss")}
        kinds = self.records[0].kinds.items()
        return sorted(name for name, kind in kinds if kind == "parameter" and name not in trained)

    @property
    def differing_tensors(self) -> list[str]:
        """The buffers and other tensors of modules that are not equal on all ranks after the step."""
        first, *others = (x.after for x in self.ranks)
        kinds = self.records[0].kinds.items()
        names = [x for x, kind in kinds if kind != "parameter" and all(x in after for after in (first, *others))]
        return [x for x in names if not all(torch.equal(first[x], after[x]) for after in others)]

    @property
    def _all(self) -> list[Step]:
        return [*self.ranks, *([self.one] if self.one is not None else [])]

    def gradient(self, names: Sequence[str]) -> Vector:
        """Return gradients before clipping; after it where only one process clips by a function that is watched."""
        if len({bool(x.clips) for x in self._all}) > 1:
            return lambda step: flat(step.received, names)
        return lambda step: flat(step.gradients, names)

    def is_same(self, vector: Vector) -> bool:
        """Return whether every rank has what one process has, but for rounding; no rerun is needed to say so."""
        assert self.one is not None
        return self.worst(map(vector, self.ranks), vector(self.one)).error <= ROUNDING_FACTOR * self.eps

    def tolerance(self, vector: Vector, floor: float = 0.0) -> float:
        """Return the largest relative error of a right result, from reruns with other roundings."""
        assert self.one is not None
        expected = vector(self.one)
        differences = [Ratio.between(vector(x), expected).error for x in self.noisy]
        factor = LOW_NOISE_FACTOR if self.reruns.unit else NOISE_FACTOR
        return tolerance(differences, self.eps, noise_factor=factor, floor=floor)

    def worst(self, vectors: Iterable[Tensor], expected: Tensor) -> Ratio:
        ratios = [Ratio.between(x, expected) for x in vectors]
        return max(ratios, key=lambda x: math.inf if math.isnan(x.error) else x.error)


def flat(sketches: Sketches, names: Sequence[str]) -> Tensor:
    """Return the sketches of these tensors as one vector; a missing one counts as zero."""
    zero = torch.zeros(64, dtype=torch.float64)
    return torch.cat([sketches.get(name, zero) for name in names] or [zero])
