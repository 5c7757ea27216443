"""The measurements of a loss on a global batch, on one process and on W ranks; each is made once."""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Literal

import torch
from torch import Tensor

from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.faults import Traits, traits
from contrastive_zoo.testing.measurement import (
    UNCHANGED,
    Call,
    Case,
    Encoder,
    Gradients,
    GradReduction,
    Measurement,
    Plan,
    Subject,
    call_form,
    measure,
    whole_batch,
)
from contrastive_zoo.testing.messages import Message
from contrastive_zoo.testing.training import Outcome, Training, train
from contrastive_zoo.testing.worlds import RankError, Worlds

TRAINING_TIMEOUT = 10.0
"""Largest timeout in seconds of a training of a few steps."""


class Trial:
    """One loss on one global batch. Invariants read its measurements; each is made once.

    Args:
        case: the loss.
        batch: the global batch.
        worlds: the process groups to run on.
    """

    def __init__(self, case: Case, batch: GlobalBatch, worlds: Worlds) -> None:
        self.case, self.batch, self.worlds = case, batch, worlds
        self.on_ranks = lru_cache(maxsize=None)(self._on_ranks)
        self.on_one_process = lru_cache(maxsize=None)(self._on_one_process)
        self.train_on_ranks = lru_cache(maxsize=None)(self._train_on_ranks)
        self.train_on_one_process = lru_cache(maxsize=None)(self._train_on_one_process)

    @cached_property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return len(self.batch.shards)

    def _on_ranks(self, plan: Plan = UNCHANGED) -> list[Measurement]:
        """Measure on W ranks; return the measurements in rank order.

        Raises:
            RankError: a rank raised, died or never answered.
        """
        return self.worlds.run(len(plan.shards or self.batch.shards), measure, self.case, self.batch, plan)

    def _on_one_process(self, plan: Plan = UNCHANGED) -> Measurement:
        """Measure on one process that holds all samples.

        Raises:
            RankError: the process raised.
        """
        whole = Plan(plan.scale, (self.batch.total,), None, plan.shuffle_samples, plan.second_seed, edit=plan.edit)
        return self.worlds.run(1, measure, self.case, self.batch, whole)[0]

    def reduced(self, of: Literal["encoder", "parameters"], plan: Plan = UNCHANGED) -> Gradients:
        """Return the gradients after the gradient all-reduce of the trainer."""
        return self.reduce([getattr(result, of) for result in self.on_ranks(plan)])

    def reduce(self, by_rank: Sequence[Gradients]) -> Gradients:
        """Reduce gradients over ranks as the trainer does."""
        if self.case.step:  # the step has already reduced them
            return by_rank[0]
        weight = 1 / len(by_rank) if self.case.grad_reduction == "mean" else 1.0
        return {name: weight * torch.stack([result[name] for result in by_rank]).sum(0) for name in by_rank[0]}

    @cached_property
    def traits(self) -> Traits:
        """Return the properties of the loss that decide which invariants apply."""
        return self.worlds.run(1, traits, self.case)[0]

    @cached_property
    def training(self) -> Training:
        """Return the steps of :meth:`Training.of` at which one process does not raise."""
        candidates = Training.of(self.batch)
        outcomes = self.train_on_one_process(candidates)
        steps = zip(candidates.steps, outcomes, strict=True)
        return Training(tuple(batch for batch, outcome in steps if isinstance(outcome, Measurement)))

    def _train_on_ranks(self, training: Training) -> tuple[list[list[Outcome]], list[list[Message]]]:
        """Train on W ranks; return the outcomes of all steps and the messages, by rank.

        Raises:
            RankError: a rank raised anything but a ValueError, died or never answered.
        """
        timeout = min(self.worlds.timeout, TRAINING_TIMEOUT)
        result = self.worlds.run(self.world_size, train, self.case, training, timeout=timeout)
        return [outcomes for outcomes, _ in result], [messages for _, messages in result]

    def _train_on_one_process(self, training: Training) -> list[Outcome]:
        """Train on one process; return the outcomes of all steps."""
        return self.worlds.run(1, train, self.case, training.on_one_process())[0][0]


def value_of(case: Case, samples: list[Tensor], d: int, worlds: Worlds) -> float:
    """Return the loss of these samples on one process; NaN if it raises."""
    try:
        return worlds.run(1, _value, case, samples, d)[0]
    except RankError:
        return float("nan")


def _value(case: Case, samples: list[Tensor], d: int) -> float:
    return float(Subject(case, d).value(samples).detach())


__all__ = [
    "UNCHANGED",
    "Call",
    "Case",
    "Encoder",
    "GradReduction",
    "Gradients",
    "Measurement",
    "Plan",
    "RankError",
    "Trial",
    "call_form",
    "measure",
    "value_of",
    "whole_batch",
]
