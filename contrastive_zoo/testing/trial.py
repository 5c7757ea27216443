"""The measurements of a loss on a global batch and in a training of a few steps, on one process and on W ranks."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.evidence import tolerance
from contrastive_zoo.testing.measurement import UNCHANGED, Case, Gradients, Measurement, Outcome, Plan, Subject, measure
from contrastive_zoo.testing.worlds import RankError, Worlds


def training_of(batch: GlobalBatch) -> tuple[GlobalBatch, ...]:
    """Return five steps from a batch: unchanged, uneven, one sample on each rank, all on rank 0, unchanged again.

    Examples:
        >>> [step.shards for step in training_of(GlobalBatch((2, 2)))]
        [(2, 2), (1, 2), (1, 1), (4, 0), (2, 2)]
    """
    size = len(batch.shards)
    on_rank_0 = (batch.total, *[0] * (size - 1))
    splits = [batch.shards, tuple(range(1, size + 1)), (1,) * size, on_rank_0, batch.shards]
    return tuple(replace(batch, shards=x, seed=batch.seed + 100 * i) for i, x in enumerate(splits))


TOLERANCE = 1e-10
"""Largest allowed difference in float64, relative to the larger of 1 and the largest expected element."""

REPETITIONS = 5
"""Repetitions with changes of up to half a unit of rounding, from which the tolerance is derived."""

SUM_ROUNDING = 4.0
"""Units of rounding by which sums of another order differ."""

DRAWS = 300
"""Calls of a loss with random numbers whose mean is compared."""

STANDARD_ERRORS = 6.0
"""Largest difference of two means, in standard errors of one: two right ones differ by less, but once in 30,000 numbers."""

AVERAGE_TIMEOUT = 60.0
"""Seconds for these calls, at least."""


class Trial:
    """One loss on one global batch. Invariants read its measurements; each is made once.

    Every method raises a RankError if a rank raises, dies or does not answer.
    """

    def __init__(self, case: Case, batch: GlobalBatch, worlds: Worlds, tolerance: float = TOLERANCE) -> None:
        self.case, self.batch, self.worlds, self.world_size = case, batch, worlds, len(batch.shards)
        self.tolerance = tolerance  # of a right result, relative to the larger of 1 and the largest expected element
        self.note = ""  # why the tolerance is not that of float64
        self._results: dict[Any, list[list[Outcome]]] = {}

    @cached_property
    def with_noise(self) -> "Trial | None":
        """Return the trial with the tolerance that measured noise gives; None if the loss computes exactly.

        Of a loss with random numbers the means of many calls are compared, with other random numbers on every rank: it is
        right if its expected value is. A loss that computes in float32 is repeated with changes of up to half a unit there.
        """
        if self.draws:
            result = Trial(replace(self.case, repetitions=DRAWS), self.batch, self.worlds)
            noise = [x.noise for x in (result.on_one_process(), *result.on_ranks())]
            result.tolerance = STANDARD_ERRORS * max(noise)
            result.note = f"draws random numbers, and means of {DRAWS} calls are compared"
            return result
        if (dtype := self.on_one_process(Plan(record=True)).precision) == torch.float64:
            return None
        expected = self.on_one_process().tensors()
        noise = []
        for seed in range(REPETITIONS):
            scale = 1 + seed / 1000  # of the loss, so that the backward pass rounds differently too
            repeated = self.on_one_process(Plan(scale, rounding=(seed, dtype))).tensors()
            for name, x in repeated.items():
                x = x / scale if name.startswith(("encoder", "parameters", "sharded")) else x
                y = expected[name]
                noise += [float((x - y).abs().max() / max(1.0, float(y.abs().max())))] if x.numel() else []
        # where embeddings do not change, as normalised ones of one dimension, sums over ranks are still rounded differently
        bound = tolerance(noise, torch.finfo(torch.float64).eps, floor=SUM_ROUNDING * torch.finfo(dtype).eps)
        result = Trial(self.case, self.batch, self.worlds, bound)
        result.note = f"computes in {str(dtype).removeprefix('torch.')}"
        return result

    @property
    def draws(self) -> bool:
        """Whether a loss draws random numbers."""
        return self.on_one_process().drew_random_numbers and not self.case.step

    def _run(self, size: int, steps: tuple[GlobalBatch, ...], plan: Plan) -> list[list[Outcome]]:
        """Run the steps of a training on ``size`` ranks, unless that was done before."""
        key = size, steps, plan
        if key not in self._results:
            timeout = max(self.worlds.timeout, AVERAGE_TIMEOUT) if self.case.repetitions else None
            self._results[key] = self.worlds.run(size, measure, self.case, steps, plan, timeout=timeout)
        return self._results[key]

    def on_ranks(self, plan: Plan = UNCHANGED) -> list[Measurement]:
        return [x for (x,) in self._run(self.world_size, (self.batch,), plan) if isinstance(x, Measurement)]

    def on_one_process(self, plan: Plan = UNCHANGED) -> Measurement:
        """Measure on one process that holds all samples."""
        ((result,),) = self._run(1, (self.batch,), replace(plan, whole=True))
        assert isinstance(result, Measurement), "one step raises its errors"
        return result

    def reduced(self, of: Literal["encoder", "parameters"], plan: Plan = UNCHANGED) -> Gradients:
        """Return the gradients after the gradient all-reduce of the trainer."""
        return self.reduce([getattr(result, of) for result in self.on_ranks(plan)])

    def reduce(self, by_rank: Sequence[Gradients]) -> Gradients:
        if self.case.step:  # the step has already reduced them
            return by_rank[0]
        weight = 1 / len(by_rank) if self.case.grad_reduction == "mean" else 1.0
        return {name: weight * torch.stack([result[name] for result in by_rank]).sum(0) for name in by_rank[0]}

    @cached_property
    def training(self) -> tuple[GlobalBatch, ...]:
        """The steps of :func:`training_of` at which one process does not raise."""
        steps = training_of(self.batch)
        outcomes = self._run(1, steps, Plan(whole=True))[0]
        return tuple(x for x, outcome in zip(steps, outcomes, strict=True) if isinstance(outcome, Measurement))

    def train_on_ranks(self, plan: Plan = UNCHANGED) -> list[list[Outcome]]:
        """Train on W ranks; return the outcomes of all steps, by rank."""
        return self._run(self.world_size, self.training, plan)

    def train_on_one_process(self, plan: Plan = UNCHANGED) -> list[Outcome]:
        return self._run(1, self.training, replace(plan, whole=True, record=False))[0]


def value_of(case: Case, samples: list[Tensor], d: int, worlds: Worlds) -> float:
    """Return the loss of these samples on one process; NaN if it raises."""

    def value() -> float:
        return float(Subject(case, d).value(samples).detach())

    try:
        return worlds.run(1, value)[0]
    except RankError:
        return float("nan")
