"""A small training: one loss object, called at every step with other shard sizes, and what each rank measures there."""

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from contrastive_zoo.small_batch import splitting
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.measurement import (
    AS_IS,
    Case,
    Encoder,
    Measurement,
    gradients,
    local_rows,
    random_streams,
    repeating_samples,
    scalar,
    split_parameters,
    start,
    state,
)
from contrastive_zoo.testing.messages import Message, Messages

Fault = Literal["option", "setting", "parameter", "argument"]
"""What the last rank has of its own: the wrapper's ``grad_reduction``, a number that the loss was made with, the value of
one of the loss's parameters, or one argument less."""

MOVE = 0.95
"""What every parameter is multiplied by after a step: what was right of the old value is wrong of the new one."""


@dataclass(frozen=True)
class Training:
    """What is trained on, and what is special about it.

    Args:
        steps: the global batch of each step.
        fault: what the last rank has of its own.
        faulty: at which steps, counted from 0.
        own_streams: whether every rank draws random numbers from a stream of its own, rank 0 from one process's.
        recording: whether collectives are recorded, which slows every operation down.
    """

    steps: tuple[GlobalBatch, ...]
    fault: Fault | None = None
    faulty: tuple[int, ...] = ()
    own_streams: bool = False
    recording: bool = False

    @classmethod
    def of(cls, batch: GlobalBatch) -> "Training":
        """Five steps from this batch: as it is, uneven, one sample on each rank, all on rank 0, and as it was.

        Example:
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
        """The same batches, each on one rank, and no fault."""
        steps = tuple(replace(batch, shards=(batch.total,)) for batch in self.steps)
        return Training(steps, own_streams=self.own_streams)


@dataclass(frozen=True)
class Refusal:
    """A step that ended in an error, and its message."""

    message: str


Outcome: TypeAlias = Measurement | Refusal


@dataclass(frozen=True)
class Traits:
    """What a loss under test has, of which some invariants speak only.

    Args:
        options: it is a wrapper that knows what the trainer does with gradients.
        setting: name of a number that the loss was made with.
        parameter: name of a parameter that every rank holds.
        sharded: whether it has parameters of which each rank holds its part.
    """

    options: bool
    setting: str | None
    parameter: str | None
    sharded: bool


def traits(case: Case) -> Traits:
    """Run on a rank: make the loss and look at it."""
    start()
    made = case.make()
    if case.step:
        return Traits(False, None, None, False)
    module = made if isinstance(made, nn.Module) else nn.Module()
    whole, parts = split_parameters(module, dict(module.named_parameters()))
    setting = _setting(made)
    return Traits(_is_wrapper(made), setting and setting[1], next(iter(whole), None), bool(parts))


def train(case: Case, training: Training) -> tuple[list[Outcome], list[Message]]:
    """Run on every rank: make the loss once, then step after step feed it this rank's part, go backward and look."""
    start()
    made = repeating_samples(case.make())
    if training.own_streams:
        _seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    model, step = made if case.step else (Encoder(training.steps[0].d), None)
    model, module = model.double(), made.double() if isinstance(made, nn.Module) else nn.Module()
    outcomes: list[Outcome] = []
    messages = Messages()
    refusals = Exception if _ranks() == 1 else ValueError  # what one process cannot compute is not asked of several
    for number, batch in enumerate(training.steps):
        fault = training.fault if number in training.faulty and _is_last() else None
        rows = local_rows(case, batch, AS_IS)[: -1 if fault == "argument" else None]
        streams = random_streams()
        # every second batch as if it were large, of which ranks share the work
        shared = splitting(always=case.shared and number % 2 == 0)
        with shared, _at_fault(made, fault), messages if training.recording else nullcontext():
            try:
                if step is not None:
                    value = float(step(model, *rows))
                else:
                    loss = scalar(made(*model.rows(rows)))
                    loss.backward()
                    value = float(loss.detach())
            except refusals as error:
                outcomes.append(Refusal(str(error)))
            else:
                whole, parts = split_parameters(module, gradients(module.named_parameters()))
                found = Measurement(value, gradients(model.named_parameters()), whole, parts, state(module))
                outcomes.append(replace(found, draws=random_streams() != streams))
        _move([*model.parameters(), *module.parameters()])
    return outcomes, messages.sent


def _ranks() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _is_last() -> bool:
    return torch.distributed.get_rank() == _ranks() - 1


def _is_wrapper(made: Any) -> bool:
    return isinstance(made, nn.Module) and {"grad_reduction", "loss"} <= {*vars(made), *made._modules}


@contextmanager
def _at_fault(made: Any, fault: Fault | None) -> Iterator[None]:
    """Within it, this rank has something of its own."""
    if fault == "option":
        before, made.grad_reduction = made.grad_reduction, "sum" if made.grad_reduction == "mean" else "mean"
        yield
        made.grad_reduction = before
    elif fault == "setting":
        found = _setting(made)
        assert found is not None, "asked only of losses that have one"
        module, name = found
        number = getattr(module, name)
        setattr(module, name, 0.9 * number)
        yield
        setattr(module, name, number)
    elif fault == "parameter":
        whole, _ = split_parameters(made, dict(made.named_parameters()))
        parameter = next(iter(whole.values()))
        kept = parameter.detach().clone()
        parameter.data += torch.linspace(0.1, 0.2, parameter.numel()).view_as(parameter)  # a shift may cancel out
        yield
        parameter.data.copy_(kept)
    else:
        yield


def _setting(made: Any) -> tuple[nn.Module, str] | None:
    """The first number that a wrapped loss was made with: in whose attribute, and its name."""
    for module in made.loss.modules() if _is_wrapper(made) and isinstance(made.loss, nn.Module) else ():
        for name, x in vars(module).items():
            if isinstance(x, float) and x != 0 and math.isfinite(x) and not name.startswith("_"):
                return module, name
    return None


def _move(parameters: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(MOVE)
            parameter.grad = None


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
