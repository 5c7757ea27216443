"""The measurements of a loss on a global batch and in a training of a few steps, on one process and on W ranks."""

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from contrastive_zoo.ranks.world import World
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.measurement import (
    UNCHANGED,
    Case,
    Gradients,
    Measurement,
    Plan,
    Subject,
    local_shard,
    measure,
)
from contrastive_zoo.testing.messages import Message, Messages
from contrastive_zoo.testing.noise import tolerance
from contrastive_zoo.testing.worlds import RankError, Worlds
from contrastive_zoo.wrapper.step import splitting

# --- a training: one loss object, called with different shard sizes ----------------------------------------------------

PARAMETER_FACTOR = 0.95
"""Factor of every parameter after each step, so that results of the old parameters are wrong at the next step."""


@dataclass(frozen=True)
class Training:
    """The global batch of each step of a training, and how it runs."""

    steps: tuple[GlobalBatch, ...]
    seed_per_rank: bool = False  # rank 0 then has the random state of one process
    record: bool = False  # whether to record collectives, which slows every operation down

    @classmethod
    def of(cls, batch: GlobalBatch) -> "Training":
        """Return five steps from a batch: unchanged, uneven, one sample on each rank, all on rank 0, unchanged again.

        Examples:
            >>> [step.shards for step in Training.of(GlobalBatch((2, 2))).steps]
            [(2, 2), (1, 2), (1, 1), (4, 0), (2, 2)]
        """
        size = len(batch.shards)
        on_rank_0 = (batch.total, *[0] * (size - 1))
        splits = [batch.shards, tuple(range(1, size + 1)), (1,) * size, on_rank_0, batch.shards]
        return cls(tuple(replace(batch, shards=x, seed=batch.seed + 100 * i) for i, x in enumerate(splits)))

    def on_one_process(self) -> "Training":
        """Return the same batches, each on one rank."""
        steps = tuple(replace(batch, shards=(batch.total,)) for batch in self.steps)
        return Training(steps, seed_per_rank=self.seed_per_rank)


Outcome: TypeAlias = Measurement | str
"""What a step computes, or the message of the error in which it ended."""


def train(case: Case, training: Training) -> tuple[list[Outcome], list[Message]]:
    """Construct the loss once and run every step; return each step's outcome and all messages. Runs on every rank."""
    subject, world = Subject(case, training.steps[0].d), World.of()
    if training.seed_per_rank:
        torch.default_generator.manual_seed(world.rank)
        np.random.seed(world.rank)
        random.seed(world.rank)
    outcomes: list[Outcome] = []
    messages = Messages()
    # one process may raise anything: the step is then left out. Several ranks may raise only a ValueError.
    expected_errors = Exception if world.size == 1 else ValueError
    for index, batch in enumerate(training.steps):
        # every second step takes the general path, in which ranks split the work
        path = splitting(always=case.shared and index % 2 == 0)
        with path, messages if training.record else nullcontext():
            try:
                outcomes.append(subject.measure([local_shard(case, batch, UNCHANGED)]))
            except expected_errors as error:
                outcomes.append(str(error))
        with torch.no_grad():
            for parameter in {*subject.model.parameters(), *subject.parameters.values()}:
                parameter.mul_(PARAMETER_FACTOR)
                parameter.grad = None
    return outcomes, messages.sent


# --- what invariants read ----------------------------------------------------------------------------------------------

R = TypeVar("R")

TOLERANCE = 1e-10
"""Largest allowed difference in float64, relative to the larger of 1 and the largest expected element."""

REPETITIONS = 5
"""Repetitions with changes of up to half a unit of rounding, from which the tolerance is derived."""

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
        self._results: dict[Any, list[Any]] = {}

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
        if (dtype := self.precision) == torch.float64:
            return None
        expected = self.on_one_process().tensors()
        noise = []
        for seed in range(REPETITIONS):
            scale = 1 + seed / 1000  # of the loss, so that the backward pass rounds differently too
            repeated = self.on_one_process(Plan(scale, rounding=(seed, dtype))).tensors()
            for name, x in repeated.items():
                is_gradient = name.startswith(("encoder", "parameters", "sharded"))
                noise.append(_difference(x / scale if is_gradient else x, expected[name]))
        result = Trial(self.case, self.batch, self.worlds, tolerance(noise, torch.finfo(torch.float64).eps))
        result.note = f"computes in {str(dtype).removeprefix('torch.')}"
        return result

    @property
    def draws(self) -> bool:
        """Whether a loss draws random numbers."""
        return self.on_one_process().drew_random_numbers and not self.case.step

    @property
    def precision(self) -> torch.dtype:
        """The narrowest dtype in which the loss computes on one process."""
        return self.on_one_process(Plan(record=True)).precision

    def _run(self, size: int, job: Callable[..., R], *args: Any) -> list[R]:
        """Run a job of the case on ``size`` ranks, unless it has run with these arguments before."""
        key = (size, job, args)
        if key not in self._results:
            timeout = max(self.worlds.timeout, AVERAGE_TIMEOUT) if self.case.repetitions else None
            self._results[key] = self.worlds.run(size, job, self.case, *args, timeout=timeout)
        return self._results[key]

    def on_ranks(self, plan: Plan = UNCHANGED) -> list[Measurement]:
        return self._run(self.world_size, measure, self.batch, plan)

    def on_one_process(self, plan: Plan = UNCHANGED) -> Measurement:
        """Measure on one process that holds all samples."""
        return self._run(1, measure, self.batch, replace(plan, whole=True))[0]

    def reduced(self, of: Literal["encoder", "parameters"], plan: Plan = UNCHANGED) -> Gradients:
        """Return the gradients after the gradient all-reduce of the trainer."""
        return self.reduce([getattr(result, of) for result in self.on_ranks(plan)])

    def reduce(self, by_rank: Sequence[Gradients]) -> Gradients:
        if self.case.step:  # the step has already reduced them
            return by_rank[0]
        weight = 1 / len(by_rank) if self.case.grad_reduction == "mean" else 1.0
        return {name: weight * torch.stack([result[name] for result in by_rank]).sum(0) for name in by_rank[0]}

    @cached_property
    def training(self) -> Training:
        """Return the steps of :meth:`Training.of` at which one process does not raise."""
        candidates = Training.of(self.batch)
        steps = zip(candidates.steps, self.train_on_one_process(candidates), strict=True)
        return Training(tuple(batch for batch, outcome in steps if isinstance(outcome, Measurement)))

    def train_on_ranks(self, training: Training) -> list[tuple[list[Outcome], list[Message]]]:
        """Train on W ranks; return the outcomes of all steps and the messages, by rank."""
        return self._run(self.world_size, train, training)

    def train_on_one_process(self, training: Training) -> list[Outcome]:
        return self._run(1, train, training.on_one_process())[0][0]


def _difference(x: Tensor, expected: Tensor) -> float:
    return float((x - expected).abs().max() / max(1.0, float(expected.abs().max()))) if x.numel() else 0.0


def value_of(case: Case, samples: list[Tensor], d: int, worlds: Worlds) -> float:
    """Return the loss of these samples on one process; NaN if it raises."""

    def value() -> float:
        return float(Subject(case, d).value(samples).detach())

    try:
        return worlds.run(1, value)[0]
    except RankError:
        return float("nan")
