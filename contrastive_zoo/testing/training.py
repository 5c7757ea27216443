"""A training of a few steps: one loss object, called with different shard sizes, and measured at every step."""

import random
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from torch import nn

from contrastive_zoo.ranks.world import World
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.faults import Fault, inject
from contrastive_zoo.testing.measurement import UNCHANGED, Case, Measurement, Subject, local_shard
from contrastive_zoo.testing.messages import Message, Messages
from contrastive_zoo.wrapper.step import splitting

PARAMETER_FACTOR = 0.95
"""Factor of every parameter after each step, so that results of the old parameters are wrong at the next step."""


@dataclass(frozen=True)
class Training:
    """The batches of a training, and its variations.

    Args:
        steps: the global batch of each step.
        fault: what differs on the last rank.
        fault_steps: the steps with the fault, counted from 0.
        seed_per_rank: whether the random states of the ranks differ; rank 0 then has the state of one process.
        record_collectives: whether to record collectives, which slows every operation down.
    """

    steps: tuple[GlobalBatch, ...]
    fault: Fault | None = None
    fault_steps: tuple[int, ...] = ()
    seed_per_rank: bool = False
    record_collectives: bool = False

    @classmethod
    def of(cls, batch: GlobalBatch) -> "Training":
        """Return five steps from a batch: unchanged, uneven, one sample on each rank, all on rank 0, unchanged again.

        Examples:
            >>> [step.shards for step in Training.of(GlobalBatch((2, 2))).steps]
            [(2, 2), (1, 2), (1, 1), (4, 0), (2, 2)]
        """
        world_size = len(batch.shards)
        sizes = [
            batch.shards,
            tuple(range(1, world_size + 1)),
            (1,) * world_size,
            (batch.total, *[0] * (world_size - 1)),
            batch.shards,
        ]
        return cls(tuple(replace(batch, shards=x, seed=batch.seed + 100 * i) for i, x in enumerate(sizes)))

    def on_one_process(self) -> "Training":
        """Return the same batches, each on one rank, without a fault."""
        steps = tuple(replace(batch, shards=(batch.total,)) for batch in self.steps)
        return Training(steps, seed_per_rank=self.seed_per_rank)


@dataclass(frozen=True)
class StepError:
    """The message of the error in which a step ended."""

    message: str


Outcome: TypeAlias = Measurement | StepError


def train(case: Case, training: Training) -> tuple[list[Outcome], list[Message]]:
    """Construct the loss once and run every step; return each step's outcome and all messages. Runs on every rank."""
    subject, world = Subject(case, training.steps[0].d), World.of()
    if training.seed_per_rank:
        _seed(world.rank)
    outcomes: list[Outcome] = []
    messages = Messages()
    # one process may raise anything: the step is then left out. Several ranks may raise only a ValueError.
    expected_errors = Exception if world.size == 1 else ValueError
    for index, batch in enumerate(training.steps):
        fault = training.fault if index in training.fault_steps and world.rank == world.size - 1 else None
        arguments = local_shard(case, batch, UNCHANGED)[: -1 if fault == "argument" else None]
        # every second step takes the general path, in which ranks split the work
        path = splitting(always=case.shared and index % 2 == 0)
        with path, inject(fault, subject.loss), messages if training.record_collectives else nullcontext():
            try:
                outcomes.append(subject.measure([arguments]))
            except expected_errors as error:
                outcomes.append(StepError(str(error)))
        _change([*subject.model.parameters(), *subject.parameters.values()])
    return outcomes, messages.sent


def _change(parameters: list[nn.Parameter]) -> None:
    """Multiply all parameters and clear their gradients."""
    with torch.no_grad():
        for parameter in {id(parameter): parameter for parameter in parameters}.values():
            parameter.mul_(PARAMETER_FACTOR)
            parameter.grad = None


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
