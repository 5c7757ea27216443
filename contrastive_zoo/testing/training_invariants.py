"""The invariants of a training: equal results at every step, and equal errors where ranks disagree."""

from dataclasses import replace
from itertools import zip_longest

import torch

from contrastive_zoo.testing.faults import Fault
from contrastive_zoo.testing.invariant import (
    Broken,
    NotApplicable,
    close,
    first_line,
    invariant,
    number,
    require_loss,
    same_gradients,
)
from contrastive_zoo.testing.measurement import Measurement
from contrastive_zoo.testing.messages import Message
from contrastive_zoo.testing.training import Outcome, StepError, Training
from contrastive_zoo.testing.trial import Trial
from contrastive_zoo.testing.worlds import RankError

MIN_STEPS = 4
"""Fewest steps of a training that is tested."""


@invariant(catches="scaled from call 3")
def same_at_later_steps(trial: Trial) -> None:
    """Value and gradients equal those of one process at every step of a training in which shard sizes change.

    When it fails, the first step is right and a later one is not: a rank reuses sizes, buffers or a path of an earlier
    step.
    """
    _same_training(trial, trial.training)


@invariant(catches="own random stream")
def same_random_numbers(trial: Trial) -> None:
    """A loss with random numbers uses those of one process, on every rank and at every step.

    When it fails, ranks compute different losses, and a run cannot be repeated on another number of processes. In the
    test the random states of the ranks differ, as after data loading. Applies only to losses with random numbers.
    """
    training = replace(trial.training, seed_per_rank=True)
    require_loss(trial)
    if not any(isinstance(x, Measurement) and x.drew_random_numbers for x in trial.train_on_one_process(training)):
        raise NotApplicable("this loss draws no random numbers")
    _same_training(trial, training)


@invariant(catches="sharded weights, W×")
def same_sharded_gradient(trial: Trial) -> None:
    """The gradients of a sharded parameter, concatenated over ranks, equal the gradient of one process.

    When it fails, sharded class weights have another effective learning rate than the encoder. Applies only to losses with
    sharded parameters; such a module has an attribute ``sharded = True``.
    """
    if not trial.traits.sharded and not any(result.sharded for result in trial.on_ranks()):
        raise NotApplicable("this loss has no sharded parameters")
    ranks, _ = _trained(trial, trial.training)
    for step, reference in enumerate(trial.train_on_one_process(trial.training), 1):
        assert isinstance(reference, Measurement)
        shards = [result.sharded for result in _measured(ranks, step)]
        whole = {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}
        expected = reference.sharded or {name: reference.parameters[name] for name in whole}
        same_gradients(whole, expected, f"at step {step}, the gradient of sharded parameters")


@invariant(catches="settings not compared")
def settings_agree(trial: Trial) -> None:
    """A setting that differs on one rank raises the same ValueError on all ranks, at that call or the next.

    When it fails, one rank with another configuration makes all ranks train on a loss that nobody configured.
    Applies only to wrappers with an option ``grad_reduction``.
    """
    _require_wrapper(trial)
    _require_same_error(trial, "option", "grad_reduction")
    if trial.traits.setting is not None:
        _require_same_error(trial, "setting", trial.traits.setting)


@invariant(catches="parameters not compared")
def parameters_agree(trial: Trial) -> None:
    """Loss parameters that differ between ranks raise the same ValueError on all ranks, at the first call or the next.

    When it fails, proxies that were initialised with a different seed on each rank stay undetected. Applies only to
    wrappers around a loss with replicated parameters.
    """
    _require_wrapper(trial)
    if trial.traits.parameter is None:
        raise NotApplicable("this loss has no parameters that every rank holds")
    _require_same_error(trial, "parameter", trial.traits.parameter, first=0)


@invariant(catches="arguments not compared")
def arguments_agree(trial: Trial) -> None:
    """An argument that is missing on one rank at a later step raises the same ValueError on all ranks, at that call.

    When it fails, the other ranks wait for that rank until the process group's timeout, or the process is aborted.
    Applies only to wrappers.
    """
    _require_wrapper(trial)
    _require_same_error(trial, "argument", "the last argument", steps=1)


@invariant(catches="one message more")
def same_messages(trial: Trial) -> None:
    """Every rank calls the same collectives in the same order, with equal element counts where the collective needs them.

    When it fails, a rank decides from local data what it sends: for some batch, ranks wait for each other, or match
    messages that do not belong together.
    """
    _, (first, *others) = _trained(trial, replace(trial.training, record_collectives=True))
    for rank, sent in enumerate(others, 1):
        for position, (message, of_rank_0) in enumerate(zip_longest(sent, first), 1):
            if message != of_rank_0:
                raise Broken(
                    f"message {position} of rank {rank} is {message or 'missing'}; rank 0's: {of_rank_0 or 'missing'}"
                )


TRAINING_INVARIANTS = (
    same_at_later_steps,
    same_random_numbers,
    same_sharded_gradient,
    settings_agree,
    parameters_agree,
    arguments_agree,
    same_messages,
)
"""The invariants of a training."""


def _require_wrapper(trial: Trial) -> None:
    if trial.world_size == 1:
        raise NotApplicable("there is no other rank to differ from")
    if not trial.traits.is_wrapper:
        raise NotApplicable("applies to wrappers with an option grad_reduction")


def _trained(trial: Trial, training: Training) -> tuple[list[list[Outcome]], list[list[Message]]]:
    if trial.world_size == 1 or len(training.steps) < MIN_STEPS:
        raise NotApplicable("there is one rank only, or one process raises at most steps")
    try:
        return trial.train_on_ranks(training)
    except RankError as error:
        raise Broken(f"in a training of {len(training.steps)} steps, {first_line(error)}") from error


def _measured(ranks: list[list[Outcome]], step: int) -> list[Measurement]:
    """Return the measurements of all ranks at one step."""
    outcomes = [by_step[step - 1] for by_step in ranks]
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, StepError):
            raise Broken(f"one process computes a value at step {step}, but rank {rank} raised {outcome.message}")
    return [outcome for outcome in outcomes if isinstance(outcome, Measurement)]


def _same_training(trial: Trial, training: Training) -> None:
    """Compare value, gradients and state of every rank at every step with one process."""
    ranks, _ = _trained(trial, training)
    for step, reference in enumerate(trial.train_on_one_process(training), 1):
        by_rank = _measured(ranks, step)
        assert isinstance(reference, Measurement), "trial.training has only steps that one process computes"
        for rank, result in enumerate(by_rank):
            close(number(result.value), number(reference.value), f"at step {step}, rank {rank} returns", "one process")
            same_gradients(result.state, reference.state, f"at step {step}, the loss's state on rank {rank}")
        for what in ("encoder", "parameters"):
            reduced = trial.reduce([getattr(result, what) for result in by_rank])
            expected = {name: x for name, x in getattr(reference, what).items() if name in reduced}
            same_gradients(reduced, expected, f"at step {step}, the gradient of the {what}")


def _require_same_error(trial: Trial, fault: Fault, name: str, *, first: int = 2, steps: int = 2) -> None:
    """Require the same ValueError on all ranks for a fault of one rank, and right values before and after it."""
    fault_steps = tuple(range(first, first + steps))
    ranks, _ = _trained(trial, replace(trial.training, fault=fault, fault_steps=fault_steps))
    what = f"{name} {'is missing' if fault == 'argument' else 'differs'} on rank {trial.world_size - 1}"
    raised = []
    for step in fault_steps:
        errors = [x.message if isinstance(x, StepError) else None for x in (by_step[step] for by_step in ranks)]
        if len(set(errors)) > 1:
            by_rank = "; ".join(f"rank {rank} {'raised ' + e if e else 'continued'}" for rank, e in enumerate(errors))
            raise Broken(f"{what} at step {step + 1}, and ranks do not raise the same error: {by_rank}")
        raised += [text for text in errors if text]
    if not raised:
        raise Broken(f"{what} from step {first + 1} on, and no rank raises")
    for step, reference in enumerate(trial.train_on_one_process(trial.training), 1):
        assert isinstance(reference, Measurement), "trial.training has only steps that one process computes"
        if step - 1 in fault_steps or reference.state or reference.drew_random_numbers:
            continue  # a step that raises changes no state, so later steps of a stateful loss differ
        for rank, result in enumerate(_measured(ranks, step)):
            context = f"{what} at step {first + 1}; at step {step}, rank {rank} returns"
            close(number(result.value), number(reference.value), context, "one process")
