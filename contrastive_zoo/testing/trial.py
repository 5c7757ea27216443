"""The measurements of a loss on a global batch, on one process and on W ranks; each is made once."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.measurement import UNCHANGED, Case, Gradients, Measurement, Plan, Subject, measure
from contrastive_zoo.testing.messages import Message
from contrastive_zoo.testing.training import Outcome, Training, Traits, train, traits
from contrastive_zoo.testing.worlds import RankError, Worlds

R = TypeVar("R")

TRAINING_TIMEOUT = 10.0
"""Largest timeout in seconds of a training of a few steps."""


class Trial:
    """One loss on one global batch. Invariants read its measurements; each is made once.

    Every method raises a RankError if a rank raises, dies or does not answer.
    """

    def __init__(self, case: Case, batch: GlobalBatch, worlds: Worlds) -> None:
        self.case, self.batch, self.worlds, self.world_size = case, batch, worlds, len(batch.shards)
        self._results: dict[Any, list[Any]] = {}

    def _run(self, size: int, job: Callable[..., R], *args: Any, timeout: float | None = None) -> list[R]:
        """Run a job of the case on ``size`` ranks, unless it has run with these arguments before."""
        key = (size, job, args)
        if key not in self._results:
            self._results[key] = self.worlds.run(size, job, self.case, *args, timeout=timeout)
        return self._results[key]

    def on_ranks(self, plan: Plan = UNCHANGED) -> list[Measurement]:
        """Measure on W ranks; return the measurements in rank order."""
        return self._run(len(plan.shards or self.batch.shards), measure, self.batch, plan)

    def on_one_process(self, plan: Plan = UNCHANGED) -> Measurement:
        """Measure on one process that holds all samples."""
        whole = Plan(plan.scale, (self.batch.total,), None, plan.shuffle_samples, plan.second_seed, edit=plan.edit)
        return self._run(1, measure, self.batch, whole)[0]

    def reduced(self, of: Literal["encoder", "parameters"], plan: Plan = UNCHANGED) -> Gradients:
        """Return the gradients after the gradient all-reduce of the trainer."""
        return self.reduce([getattr(result, of) for result in self.on_ranks(plan)])

    def reduce(self, by_rank: Sequence[Gradients]) -> Gradients:
        """Reduce gradients over ranks as the trainer does."""
        if self.case.step:  # the step has already reduced them
            return by_rank[0]
        weight = 1 / len(by_rank) if self.case.grad_reduction == "mean" else 1.0
        return {name: weight * torch.stack([result[name] for result in by_rank]).sum(0) for name in by_rank[0]}

    @property
    def traits(self) -> Traits:
        """Return the properties of the loss that decide which invariants apply."""
        return self._run(1, traits)[0]

    @cached_property
    def training(self) -> Training:
        """Return the steps of :meth:`Training.of` at which one process does not raise."""
        candidates = Training.of(self.batch)
        steps = zip(candidates.steps, self.train_on_one_process(candidates), strict=True)
        return Training(tuple(batch for batch, outcome in steps if isinstance(outcome, Measurement)))

    def train_on_ranks(self, training: Training) -> list[tuple[list[Outcome], list[Message]]]:
        """Train on W ranks; return the outcomes of all steps and the messages, by rank."""
        return self._run(self.world_size, train, training, timeout=min(self.worlds.timeout, TRAINING_TIMEOUT))

    def train_on_one_process(self, training: Training) -> list[Outcome]:
        """Train on one process; return the outcomes of all steps."""
        return self._run(1, train, training.on_one_process())[0][0]


def value_of(case: Case, samples: list[Tensor], d: int, worlds: Worlds) -> float:
    """Return the loss of these samples on one process; NaN if it raises."""

    def value() -> float:
        return float(Subject(case, d).value(samples).detach())

    try:
        return worlds.run(1, value)[0]
    except RankError:
        return float("nan")
