"""The laws of a training: what must hold at every step, and when ranks differ in what they must have in common."""

from dataclasses import replace
from itertools import zip_longest

import torch

from contrastive_zoo.testing.law import (
    Broken,
    NotTried,
    asked_of_losses,
    close,
    first_line,
    law,
    number,
    same_gradients,
)
from contrastive_zoo.testing.measurement import Measurement
from contrastive_zoo.testing.messages import Message
from contrastive_zoo.testing.training import Fault, Outcome, Refusal, Training
from contrastive_zoo.testing.trial import Trial
from contrastive_zoo.testing.worlds import RankError

LEAST_STEPS = 4
"""Of a training whose later steps are looked at."""


@law(catches="scaled from call 3")
def same_at_later_steps(trial: Trial) -> None:
    """At every step of a training value and gradients are one process's, whatever the shard sizes of earlier steps.

    When it fails, the first step is right and the run is not: what a rank remembers of earlier steps (sizes, buffers, a
    shorter path) does not fit the present one.
    """
    _same_training(trial, trial.training)


@law(catches="own random stream")
def draws_are_shared(trial: Trial) -> None:
    """A loss that draws random numbers draws the same on every rank, and what one process would draw, at every step.

    When it fails, ranks compute different losses, and a run cannot be repeated on another number of processes. Ranks are
    given random states of their own, as after data loading; asked only of losses that draw.
    """
    training = replace(trial.training, own_streams=True)
    asked_of_losses(trial)
    if not any(isinstance(x, Measurement) and x.draws for x in trial.trained_alone(training)):
        raise NotTried("this loss draws no random numbers")
    _same_training(trial, training)


@law(catches="sharded weights, W×")
def same_sharded_gradient(trial: Trial) -> None:
    """The gradient of sharded parameters, put together, is one process's, without any reduction.

    When it fails, class weights of which each rank keeps its part learn at another speed than the encoder. Asked only of
    losses that have such; one that does says so by an attribute ``sharded``.
    """
    if not trial.traits.sharded and not any(found.sharded for found in trial.together()):
        raise NotTried("this loss has no sharded parameters")
    ranks, _ = _trained(trial, trial.training)
    for step, alone in enumerate(trial.trained_alone(trial.training), 1):
        assert isinstance(alone, Measurement)
        parts = [found.sharded for found in _measured(ranks, step)]
        whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        expected = alone.sharded or {name: alone.parameters[name] for name in whole}
        same_gradients(whole, expected, f"at step {step}, the gradient of sharded parameters")


@law(catches="settings not compared")
def settings_agree(trial: Trial) -> None:
    """A setting that differs on one rank raises the same ValueError on all ranks, at that call or the next.

    When it fails, one rank that reads another configuration makes all of them train on a loss that nobody asked for.
    Asked only of wrappers that know what the trainer does with gradients, since others have nothing to be asked by.
    """
    _asked_of_wrappers(trial)
    _refused(trial, "option", "grad_reduction")
    if trial.traits.setting is not None:
        _refused(trial, "setting", trial.traits.setting)


@law(catches="parameters not compared")
def parameters_agree(trial: Trial) -> None:
    """Loss parameters that differ between ranks raise the same ValueError on all ranks, at the first call or the next.

    When it fails, proxies that each rank has drawn from its own seed are trained for days. Asked only of wrappers around
    a loss with parameters that every rank holds.
    """
    _asked_of_wrappers(trial)
    if trial.traits.parameter is None:
        raise NotTried("this loss has no parameters that every rank holds")
    _refused(trial, "parameter", trial.traits.parameter, first=0)


@law(catches="arguments not compared")
def arguments_agree(trial: Trial) -> None:
    """An argument that is missing on one rank at a later step raises the same ValueError on all ranks, at that call.

    When it fails, the others wait for that rank until the process group's time-out, or the process is aborted. Asked
    only of wrappers.
    """
    _asked_of_wrappers(trial)
    _refused(trial, "argument", "the last argument", lasting=1)


@law(catches="one message more")
def same_messages(trial: Trial) -> None:
    """Every rank calls the same collectives in the same order, with as many elements where these must be equally many.

    When it fails, a rank decides what it sends from something that the others do not know: some batch will make them
    wait for each other, or pair messages that do not belong together.
    """
    _, (first, *others) = _trained(trial, replace(trial.training, recording=True))
    for rank, sent in enumerate(others, 1):
        for position, (ours, theirs) in enumerate(zip_longest(sent, first), 1):
            if ours != theirs:
                raise Broken(
                    f"message {position} of rank {rank} is {ours or 'missing'}; rank 0's: {theirs or 'missing'}"
                )


OF_TRAININGS = (
    same_at_later_steps,
    draws_are_shared,
    same_sharded_gradient,
    settings_agree,
    parameters_agree,
    arguments_agree,
    same_messages,
)
"""All of them."""


def _asked_of_wrappers(trial: Trial) -> None:
    if trial.world_size == 1:
        raise NotTried("there is no other rank to differ from")
    if not trial.traits.options:
        raise NotTried("asked of wrappers that know what the trainer does with gradients")


def _trained(trial: Trial, training: Training) -> tuple[list[list[Outcome]], list[list[Message]]]:
    if trial.world_size == 1 or len(training.steps) < LEAST_STEPS:
        raise NotTried("there is one rank only, or one process raises at most steps")
    try:
        return trial.trained(training)
    except RankError as error:
        raise Broken(f"in a training of {len(training.steps)} steps, {first_line(error)}") from error


def _measured(ranks: list[list[Outcome]], step: int) -> list[Measurement]:
    """What every rank measured at a step."""
    outcomes = [by_step[step - 1] for by_step in ranks]
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, Refusal):
            raise Broken(f"one process computes a value at step {step}, but rank {rank} raised {outcome.message}")
    return [outcome for outcome in outcomes if isinstance(outcome, Measurement)]


def _same_training(trial: Trial, training: Training) -> None:
    """Value, gradients and state of every rank at every step are one process's."""
    ranks, _ = _trained(trial, training)
    for step, alone in enumerate(trial.trained_alone(training), 1):
        by_rank = _measured(ranks, step)
        assert isinstance(alone, Measurement), "steps that one process does not compute are left out"
        for rank, found in enumerate(by_rank):
            close(number(found.value), number(alone.value), f"at step {step}, rank {rank} returns", "one process")
            same_gradients(found.state, alone.state, f"at step {step}, the loss's state on rank {rank}")
        for what in ("encoder", "parameters"):
            reduced = trial.reduce([getattr(found, what) for found in by_rank])
            expected = {name: x for name, x in getattr(alone, what).items() if name in reduced}
            same_gradients(reduced, expected, f"at step {step}, the gradient of the {what}")


def _refused(trial: Trial, fault: Fault, name: str, *, first: int = 2, lasting: int = 2) -> None:
    """One rank's fault raises the same ValueError on every rank, and what comes before and after is right."""
    at = tuple(range(first, first + lasting))
    ranks, _ = _trained(trial, replace(trial.training, fault=fault, faulty=at))
    what = f"{name} {'is missing' if fault == 'argument' else 'differs'} on rank {trial.world_size - 1}"
    raised = []
    for step in at:
        said = [x.message if isinstance(x, Refusal) else None for x in (by_step[step] for by_step in ranks)]
        if len(set(said)) > 1:
            told = "; ".join(f"rank {rank} {'raised ' + text if text else 'went on'}" for rank, text in enumerate(said))
            raise Broken(f"{what} at step {step + 1}, and ranks do not say the same: {told}")
        raised += [text for text in said if text]
    if not raised:
        raise Broken(f"{what} from step {first + 1} on, and no rank raises")
    for step, alone in enumerate(trial.trained_alone(trial.training), 1):
        if step - 1 in at or not isinstance(alone, Measurement) or alone.state or alone.draws:
            continue  # what a refused step did not leave behind is missed later
        for rank, found in enumerate(_measured(ranks, step)):
            where = f"{what} at step {first + 1}; at step {step}, rank {rank} returns"
            close(number(found.value), number(alone.value), where, "one process")
