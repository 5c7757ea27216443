"""The measurements of a loss on a global batch and in a training of a few steps, on one process and on W ranks."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

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
    set_float64_and_seed,
    split_parameters,
)
from contrastive_zoo.testing.messages import Message, Messages
from contrastive_zoo.testing.worlds import RankError, Worlds
from contrastive_zoo.wrapper.step import splitting

# --- a training: one loss object, called with different shard sizes, with a fault of one rank at some steps -------------

PARAMETER_FACTOR = 0.95
"""Factor of every parameter after each step, so that results of the old parameters are wrong at the next step."""

Fault = Literal["option", "setting", "parameter", "argument"]
"""What differs on the last rank: the wrapper's ``grad_reduction``, a setting of the loss, the value of a parameter of the
loss, or a missing argument."""


@dataclass(frozen=True)
class Training:
    """The global batch of each step of a training, and its variations."""

    steps: tuple[GlobalBatch, ...]
    fault: Fault | None = None
    fault_steps: tuple[int, ...] = ()  # counted from 0
    seed_per_rank: bool = False  # rank 0 then has the random state of one process
    record_collectives: bool = False  # slows every operation down

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
        torch.default_generator.manual_seed(world.rank)
        np.random.seed(world.rank)
        random.seed(world.rank)
    outcomes: list[Outcome] = []
    messages = Messages()
    # one process may raise anything: the step is then left out. Several ranks may raise only a ValueError.
    expected_errors = Exception if world.size == 1 else ValueError
    for index, batch in enumerate(training.steps):
        fault = training.fault if index in training.fault_steps and world.rank == world.size - 1 else None
        arguments = local_shard(case, batch, UNCHANGED)[: -1 if fault == "argument" else None]
        # every second step takes the general path, in which ranks split the work
        path = splitting(always=case.shared and index % 2 == 0)
        with path, _inject(fault, subject.loss), messages if training.record_collectives else nullcontext():
            try:
                outcomes.append(subject.measure([arguments]))
            except expected_errors as error:
                outcomes.append(StepError(str(error)))
        with torch.no_grad():
            for parameter in {*subject.model.parameters(), *subject.parameters.values()}:
                parameter.mul_(PARAMETER_FACTOR)
                parameter.grad = None
    return outcomes, messages.sent


@contextmanager
def _inject(fault: Fault | None, loss: Any) -> Iterator[None]:
    """Change the loss on this rank inside the context; a missing argument is no change of the loss."""
    if fault == "parameter":
        replicated, _ = split_parameters(loss, dict(loss.named_parameters()))
        parameter = next(iter(replicated.values()))
        value = parameter.detach().clone()
        # not a constant, which may cancel out
        parameter.data += torch.linspace(0.1, 0.2, parameter.numel()).view_as(parameter)
        yield
        parameter.data.copy_(value)
    elif fault in ("option", "setting"):
        target = (loss, "grad_reduction") if fault == "option" else _float_setting(loss)
        assert target is not None, "the fault is injected only where Traits.setting is not None"
        module, name = target
        before = getattr(module, name)
        other_option = "sum" if before == "mean" else "mean"
        setattr(module, name, other_option if fault == "option" else 0.9 * before)
        yield
        setattr(module, name, before)
    else:
        yield


@dataclass(frozen=True)
class Traits:
    """Properties of a loss that decide which invariants apply."""

    is_wrapper: bool = False  # with an option grad_reduction
    setting: str | None = None  # name of a float setting of the wrapped loss
    parameter: str | None = None  # name of a replicated parameter
    sharded: bool = False  # whether it has sharded parameters


def traits(case: Case) -> Traits:
    set_float64_and_seed()
    loss = case.make()
    if case.step:
        return Traits()
    module = loss if isinstance(loss, nn.Module) else nn.Module()
    replicated, sharded = split_parameters(module, dict(module.named_parameters()))
    setting = _float_setting(loss)
    return Traits(_is_wrapper(loss), setting and setting[1], next(iter(replicated), None), bool(sharded))


def _is_wrapper(loss: Any) -> bool:
    return isinstance(loss, nn.Module) and {"grad_reduction", "loss"} <= {*vars(loss), *loss._modules}


def _float_setting(loss: Any) -> tuple[nn.Module, str] | None:
    """Return the first float attribute of the wrapped loss: its module and its name."""
    for module in loss.loss.modules() if _is_wrapper(loss) and isinstance(loss.loss, nn.Module) else ():
        for name, x in vars(module).items():
            if isinstance(x, float) and x != 0 and math.isfinite(x) and not name.startswith("_"):
                return module, name
    return None


# --- what invariants read ----------------------------------------------------------------------------------------------

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
        return self._run(len(plan.shards or self.batch.shards), measure, self.batch, plan)

    def on_one_process(self, plan: Plan = UNCHANGED) -> Measurement:
        """Measure on one process that holds all samples."""
        whole = replace(plan, shards=(self.batch.total,), record_collectives=False)
        return self._run(1, measure, self.batch, whole)[0]

    def reduced(self, of: Literal["encoder", "parameters"], plan: Plan = UNCHANGED) -> Gradients:
        """Return the gradients after the gradient all-reduce of the trainer."""
        return self.reduce([getattr(result, of) for result in self.on_ranks(plan)])

    def reduce(self, by_rank: Sequence[Gradients]) -> Gradients:
        if self.case.step:  # the step has already reduced them
            return by_rank[0]
        weight = 1 / len(by_rank) if self.case.grad_reduction == "mean" else 1.0
        return {name: weight * torch.stack([result[name] for result in by_rank]).sum(0) for name in by_rank[0]}

    @property
    def traits(self) -> Traits:
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
        return self._run(1, train, training.on_one_process())[0][0]


def value_of(case: Case, samples: list[Tensor], d: int, worlds: Worlds) -> float:
    """Return the loss of these samples on one process; NaN if it raises."""

    def value() -> float:
        return float(Subject(case, d).value(samples).detach())

    try:
        return worlds.run(1, value)[0]
    except RankError:
        return float("nan")
