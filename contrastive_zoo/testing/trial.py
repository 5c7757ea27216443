"""A loss on a global batch, on one process and on W: each measurement is made once."""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Literal

import torch
from torch import Tensor, nn

from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.measurement import (
    AS_IS,
    Call,
    Case,
    Encoder,
    Gradients,
    GradReduction,
    Measurement,
    Plan,
    call_form,
    measure,
    scalar,
    start,
    whole_batch,
)
from contrastive_zoo.testing.messages import Message
from contrastive_zoo.testing.training import Outcome, Training, Traits, train, traits
from contrastive_zoo.testing.worlds import RankError, Worlds

MOST_SECONDS = 10.0
"""That a training of a few steps may take, before its ranks are taken to wait for each other."""


class Trial:
    """One loss on one global batch. Invariants ask it for measurements; each is made once.

    Args:
        case: the loss.
        batch: the rows.
        worlds: where to run.
    """

    def __init__(self, case: Case, batch: GlobalBatch, worlds: Worlds) -> None:
        self.case, self.batch, self.worlds = case, batch, worlds
        self.together = lru_cache(maxsize=None)(self._together)
        self.alone = lru_cache(maxsize=None)(self._alone)
        self.trained = lru_cache(maxsize=None)(self._trained)
        self.trained_alone = lru_cache(maxsize=None)(self._trained_alone)

    @cached_property
    def world_size(self) -> int:
        """W."""
        return len(self.batch.shards)

    def _together(self, plan: Plan = AS_IS) -> list[Measurement]:
        """By rank, on W processes.

        Raises:
            RankError: a rank raised, died or never answered.
        """
        return self.worlds.run(len(plan.shards or self.batch.shards), measure, self.case, self.batch, plan)

    def _alone(self, plan: Plan = AS_IS) -> Measurement:
        """On one process, which holds all rows.

        Raises:
            RankError: it raised.
        """
        whole = Plan(plan.scale, (self.batch.total,), None, plan.shuffle_rows, plan.then)
        return self.worlds.run(1, measure, self.case, self.batch, whole)[0]

    def reduced(self, what: Literal["encoder", "parameters"], plan: Plan = AS_IS) -> Gradients:
        """Gradients after the trainer's reduction over ranks."""
        return self.reduce([getattr(found, what) for found in self.together(plan)])

    def reduce(self, by_rank: Sequence[Gradients]) -> Gradients:
        """What the trainer makes of the ranks' gradients."""
        if self.case.step:  # the step has reduced them
            return by_rank[0]
        weight = 1 / len(by_rank) if self.case.grad_reduction == "mean" else 1.0
        return {name: weight * torch.stack([found[name] for found in by_rank]).sum(0) for name in by_rank[0]}

    @cached_property
    def traits(self) -> Traits:
        """What the loss has, of which some invariants speak only."""
        return self.worlds.run(1, traits, self.case)[0]

    @cached_property
    def training(self) -> Training:
        """The steps of :meth:`Training.of` at which one process does not raise."""
        every = Training.of(self.batch)
        found = zip(every.steps, self.trained_alone(every), strict=True)
        return Training(tuple(batch for batch, outcome in found if isinstance(outcome, Measurement)))

    def _trained(self, training: Training) -> tuple[list[list[Outcome]], list[list[Message]]]:
        """Outcomes of every step, and the messages of all, by rank.

        Raises:
            RankError: a rank raised anything but a ValueError, died or never answered.
        """
        patience = min(self.worlds.timeout, MOST_SECONDS)
        found = self.worlds.run(self.world_size, train, self.case, training, timeout=patience)
        return [outcomes for outcomes, _ in found], [messages for _, messages in found]

    def _trained_alone(self, training: Training) -> list[Outcome]:
        """Of every step, on one process."""
        return self.worlds.run(1, train, self.case, training.on_one_process())[0][0]


def value_of(case: Case, samples: list[Tensor], d: int, worlds: Worlds) -> float:
    """What one process computes from these samples; NaN if it cannot."""
    try:
        return worlds.run(1, _value, case, samples, d)[0]
    except RankError:
        return float("nan")


def _value(case: Case, samples: list[Tensor], d: int) -> float:
    start()
    made = case.make()
    if isinstance(made, nn.Module):
        made = made.double()
    return float(scalar(made(*Encoder(d).rows(samples))).detach())


__all__ = [
    "AS_IS",
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
