"""The evidence of one step: what all ranks recorded, compared with the same step of one process."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from contrastive_zoo.testing.auditing.records import Record, Step
from contrastive_zoo.testing.auditing.rerun import Setting
from contrastive_zoo.testing.evidence import ROUNDING_FACTOR, Comparison, Evidence, Gradients, Ratio, flat, tolerance
from contrastive_zoo.testing.report import Quantity

FLOAT32 = torch.finfo(torch.float32).eps
# Reruns with changes of up to half a unit of rounding, from which the tolerance is derived; and where the error is at most
# so many tolerances: of two random changes of a number that nearly cancels, both may be small by chance
REPETITIONS, MORE_REPETITIONS, NEAR = 2, 6, 100.0
LARGEST_TOLERANCE = 0.3  # a quantity that reruns and ranks change by more is not compared
Vector = Callable[[Step], Tensor]  # returns a quantity of a step as one vector
RunAgain = Callable[[Setting], Record]  # runs the training in one process; the same setting gives the same record


class StepEvidence(Evidence):
    """A step on all ranks and on one process; without stale gradients and the script's factor of the loss."""

    is_training = True
    stages = ("value", "gradient")

    def __init__(self, index: int, records: Sequence[Record], run: RunAgain) -> None:
        self.index, self.records, self.run = index, records, run
        self.ranks = [x.steps[index] for x in records]
        self.world_size, self.stored = len(records), records[0].eps or FLOAT32  # the unit of rounding of parameters
        self.eps = min(self.stored, FLOAT32)  # that of what is not rounded to 16 bits
        low = [x.low for record in records for x in record.steps]
        self.unit = max([*low, self.stored if self.stored > FLOAT32 else 0.0])  # that of what is; 0 if nothing is
        alone, self.reason = run(Setting()), ""  # why nothing is compared
        self.one = self.of(Setting())
        if not alone.steps:
            why = f"the script raises {alone.error}" if alone.error else "nothing is trained"
            self.reason = f"in one process {why}"
        elif self.one is None:
            self.reason = "the run in one process ended before this step"
        elif len({len(x.values) for x in self._all}) > 1:
            self.one, self.reason = None, "the ranks and one process computed different numbers of losses in one step"
        self.problem = alone.problem if self.one is not None else ""  # why a difference may be one of random numbers
        self.option = next(filter(None, (call.option for call in self.ranks[0].losses)), None)

    def of(self, setting: Setting) -> Step | None:
        """Return this step of a rerun, None if that ended before."""
        steps = self.run(setting).steps
        return steps[self.index] if self.index < len(steps) else None

    @property
    def _all(self) -> list[Step]:
        return [*self.ranks, *([self.one] if self.one is not None else [])]

    def values(self, step: Step) -> Tensor:
        return torch.tensor(step.values, dtype=torch.float64)

    def names(self, group: str) -> list[str]:
        trained = {name for x in self._all for name in (*x.gradients, *x.optimized)}
        return sorted(name for name, x in self.records[0].groups.items() if x == group and name in trained)

    @property
    def other_parameters(self) -> list[str]:
        """The parameters that no optimizer trains, as those of a teacher."""
        return sorted(self.records[0].parameters - {*self.names("encoder"), *self.names("loss")})

    @property
    def differing_tensors(self) -> list[str]:
        """The buffers and other tensors of modules that are not equal on all ranks after the step."""
        first, *others = (x.after for x in self.ranks)
        tensors = [x for x in self.records[0].start if x not in self.records[0].parameters]
        names = [x for x in tensors if all(x in after for after in (first, *others))]
        return [x for x in names if not all(torch.equal(first[x], after[x]) for after in others)]

    def gradient(self, names: Sequence[str]) -> Vector:
        """Return gradients before clipping; after it where only one process clips by a function that is watched."""
        if len({bool(x.clips) for x in self._all}) > 1:
            return lambda step: flat(step.received, names)
        return lambda step: flat(step.gradients, names)

    @cached_property
    def quantities(self) -> list[Quantity]:
        """What is compared with one process, and what must be equal on all ranks."""
        value = self._judged("value of the loss", self.values)
        value.is_noted = value.ok is False and self.is_local_mean
        names_of = {group: names for group in ("encoder", "loss") if (names := self.names(group))}
        result = [value, *(self._judged(f"gradient of the {x}", self.gradient(y)) for x, y in names_of.items())]
        if any(x.clips for x in self.ranks):
            names = sorted({name for x in self.ranks for name in x.received})
            result.append(self._judged("gradient after clipping", lambda x: flat(x.received, names)))
        result += [self._moved(f"{group} after the step", x) for group, x in names_of.items()]
        if (others := self.other_parameters) and self.one is not None:
            result.append(self._moved_without_optimizer("other parameters after the step", others))
        return [*result, *(self.equality(group, names) for group, names in names_of.items())]

    @property
    def are_gradients_right(self) -> bool:
        """Whether values and gradients before clipping are those of one process, as far as they were compared."""
        return not any(x.differs for x in self.quantities if x.name.startswith(("value", "gradient of")))

    def equality(self, group: str, names: Sequence[str]) -> Quantity:
        after = [flat(x.after, names) for x in self.ranks]
        return Quantity(f"{group} equal on all ranks", worst(after, after[0]), ROUNDING_FACTOR * self.eps)

    def tolerance(self, vector: Vector, floor: float = 0.0, repetitions: int = REPETITIONS) -> float:
        """Return the largest relative error of a right result, from reruns with other roundings."""
        assert self.one is not None
        noisy = [self.of(Setting(noise=seed, unit=self.unit)) for seed in range(repetitions)]
        differences = [Ratio.between(vector(x), vector(self.one)).error for x in noisy if x is not None]
        return tolerance(differences, self.eps, floor, self.unit)

    def _judged(self, name: str, vector: Vector, floor: float = 0.0) -> Quantity:
        """Compare a quantity of all ranks with one process; noise is measured where they differ by more than rounding."""
        if self.one is None:
            return Quantity(name, reason=self.reason)
        ratio, bound = worst(map(vector, self.ranks), vector(self.one)), floor + ROUNDING_FACTOR * self.eps
        if not ratio.error <= bound:
            bound = self.tolerance(vector, floor)
        if bound < ratio.error < NEAR * bound:
            bound = self.tolerance(vector, floor, MORE_REPETITIONS)
        if not ratio.error <= bound and self.problem:
            return Quantity(name, reason=self.problem)
        if not (ratio.error <= min(bound, LARGEST_TOLERANCE) or bound <= LARGEST_TOLERANCE):
            return Quantity(name, reason=f"reruns in one process differ: the tolerance would be {bound:.1e}")
        return Quantity(name, ratio, min(bound, LARGEST_TOLERANCE))

    def _moved(self, name: str, names: Sequence[str]) -> Quantity:
        """Compare what the optimizer adds, weighted by the gradient: Adam moves elements without gradient at random."""
        names = [x for x in names if x in self.ranks[0].optimized]
        if self.one is None or not names:
            return Quantity(name, reason=self.reason if names else "no optimizer holds the parameters")

        def norm(x: Step, of: int) -> float:
            return math.hypot(*(x.norms.get(y, (0.0, 0.0))[of] for y in names))

        def vector(x: Step) -> Tensor:
            return flat(x.moved, names) / (norm(x, 0) or 1.0)

        moved = float(flat(self.one.moved, names).norm())
        return self._judged(name, vector, self.stored * norm(self.one, 1) / moved if moved else 0.0)

    def _moved_without_optimizer(self, name: str, names: Sequence[str]) -> Quantity:
        assert self.one is not None
        start = flat(self.records[0].start, names)
        moved = float((flat(self.one.after, names) - start).norm())
        rounding = 10 * self.eps * float(start.norm()) / moved if moved else 0.0
        return self._judged(name, lambda x: flat(x.after, names) - start, rounding)

    @cached_property
    def is_local_mean(self) -> bool:
        """Whether the mean of the ranks' values is that of one process, whatever each is."""
        if self.one is None:
            return False
        mean = torch.stack([*map(self.values, self.ranks)]).mean(0)
        return Ratio.between(mean, self.values(self.one)).error <= self.tolerance(self.values)

    @property
    def factor(self) -> float:
        ranks, one = self.ranks[0].factor, self.one.factor if self.one is not None else None
        return ranks / one if ranks and one else 1.0

    @cached_property
    def comparison(self) -> Comparison:
        return self._compared(self.one)

    def _compared(self, one: Step | None) -> Comparison:
        assert one is not None
        return Comparison(
            values=torch.stack([self.values(x) for x in self.ranks]),
            expected=self.values(one),
            encoder=self._gradients("encoder", one),
            parameters=self._gradients("loss", one),
            tolerance=max(self.tolerance(self.values), 1e-12),
        )

    def _gradients(self, group: str, one: Step) -> Gradients | None:
        names = [x for x in self.names(group) if x in one.gradients or x in self.ranks[0].gradients]
        if not names:
            return None
        of = self.gradient(names)
        ranks = [(of(x) - flat(x.stale, names)) / self.factor for x in self.ranks]
        return Gradients.between(ranks, of(one) - flat(one.stale, names), self.tolerance(of))

    def confirms(self, mistake: str) -> bool:
        x = self.comparison
        if mistake == "local negatives":
            alone = None if self.option or self.index or x.has_values(1.0) else self.of(Setting(ranks=(0,)))
            return alone is not None and x.near(x.values[0], self.values(alone))
        by_shard = self.of(Setting(by_shard=True)) if mistake == "batch statistics" else None
        result = x if by_shard is None else self._compared(by_shard)
        return not x.is_scaled(1.0, 1.0) and result.has_values(1.0) and result.is_scaled(1.0, 1.0)

    def calls(self, name: str) -> bool:
        """Return whether the script gathers, which it must where the loss does not."""
        return name == "gather" and self.option is None


def worst(vectors: Iterable[Tensor], expected: Tensor) -> Ratio:
    ratios = [Ratio.between(x, expected) for x in vectors]
    return max(ratios, key=lambda x: math.inf if math.isnan(x.error) else x.error)
