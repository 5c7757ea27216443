"""The laws of a global loss, each a function that raises a :class:`Broken` which says what breaks.

A law names the mistake that it catches: a key of :mod:`contrastive_zoo.testing.gallery`, where the mistake is written
out, and our tests hold that it is caught.
"""

from dataclasses import replace

import torch

from contrastive_zoo.testing.law import (
    TOLERANCE,
    Broken,
    Law,
    NotTried,
    asked_of_losses,
    close,
    first_line,
    law,
    number,
    same_gradients,
)
from contrastive_zoo.testing.laws_of_trainings import (
    OF_TRAININGS,
    arguments_agree,
    draws_are_shared,
    parameters_agree,
    same_at_later_steps,
    same_messages,
    same_sharded_gradient,
    settings_agree,
)
from contrastive_zoo.testing.measurement import AS_IS, Measurement, Plan
from contrastive_zoo.testing.trial import Trial
from contrastive_zoo.testing.worlds import RankError


@law(catches="early return")
def runs_on_every_split(trial: Trial) -> None:
    """What one process computes, W processes compute too: no rank raises or hangs on uneven and empty shards.

    When it fails, training stops at the end of an epoch, or at the first batch in which some rank has no valid pair.
    """
    trial.alone()
    try:
        trial.together()
    except RankError as error:
        raise Broken(f"one process computes a value, but {first_line(error)}") from error


@law(catches="local loss")
def same_value_on_every_rank(trial: Trial) -> None:
    """Every rank returns the same number.

    When it fails, what is logged is one rank's opinion, and early stopping or a scheduler may differ between ranks.
    """
    values = [found.value for found in trial.together()]
    for rank, value in enumerate(values):
        close(number(value), number(values[0]), f"rank {rank} returns", "rank 0")


@law(catches="own slice × W")
def same_value(trial: Trial) -> None:
    """The returned number is what one process computes from all rows.

    When it fails, losses of runs on different numbers of processes cannot be compared, nor can their schedules.
    """
    alone = trial.alone().value
    for rank, found in enumerate(trial.together()):
        close(number(found.value), number(alone), f"rank {rank} returns", "one process")


@law(catches="own slice")
def same_encoder_gradient(trial: Trial) -> None:
    """After the trainer's reduction, the encoder's gradient is what one process computes.

    When it fails, the run on W processes is another run: a factor changes the effective learning rate, a direction
    changes what is learnt.
    """
    same_gradients(trial.reduced("encoder"), trial.alone().encoder, "the encoder's gradient")


@law(catches="own slice × W")
def same_parameter_gradient(trial: Trial) -> None:
    """After the trainer's reduction, the gradient of the loss's own parameters is what one process computes.

    When it fails, temperature, proxies or class centres learn at another speed than the encoder.
    """
    same_gradients(trial.reduced("parameters"), trial.alone().parameters, "the gradient of the loss's own parameters")


@law(catches="local parameters")
def parameters_in_step(trial: Trial) -> None:
    """The gradient of the loss's own parameters is the same on every rank before any reduction.

    When it fails and the trainer does not know these parameters (they are rarely inside the wrapped model), each rank
    learns its own temperature, and the ranks compute different losses from then on.
    """
    first, *others = [found.parameters for found in trial.together()]
    for rank, found in enumerate(others, 1):
        same_gradients(found, first, f"the gradient of the loss's own parameters on rank {rank}", "rank 0's")


@law(catches="mean of means")
def blind_to_split(trial: Trial) -> None:
    """How the rows are split over the ranks changes nothing.

    When it fails, the last, smaller batch of an epoch, or a sampler that deals unevenly, weighs samples differently.
    """
    total, world_size = trial.batch.total, trial.world_size
    even = tuple(total // world_size + (rank < total % world_size) for rank in range(world_size))
    _same_outcome(trial, Plan(shards=even), f"split evenly, {list(even)}")


@law(catches="mask without offset")
def blind_to_rank_order(trial: Trial) -> None:
    """Shards dealt to the ranks in another order give the same loss and gradient.

    When it fails, which sample meets which depends on the rank that holds it. Asked only of losses that do not care
    for the order of rows on one process either.
    """
    if not _order_is_free(trial):
        raise NotTried("one process, too, computes something else from shuffled rows")
    turned = tuple((rank + 1) % trial.world_size for rank in range(trial.world_size))
    _same_outcome(trial, Plan(rank_order=turned), "with shards turned by one rank")


@law(catches="views misread")
def blind_to_row_order(trial: Trial) -> None:
    """Rows in another order give the same loss and gradient.

    When it fails, something reads positions where it should read identities: a diagonal, an offset, a tie. Asked only
    of losses that do not care for the order of rows on one process either.
    """
    if not _order_is_free(trial):
        raise NotTried("one process, too, computes something else from shuffled rows")
    _same_outcome(trial, Plan(shuffle_rows=True), "with all rows shuffled")


@law(catches="one slot for two batches")
def accumulates(trial: Trial) -> None:
    """Two forward passes, then two backward passes, give the mean of both gradients.

    When it fails, gradient accumulation and models that call the loss twice train on something else.
    """
    asked_of_losses(trial)
    plan = Plan(then=trial.batch.seed + 1)
    same_gradients(trial.reduced("encoder", plan), trial.alone(plan).encoder, "the accumulated gradient")
    if trial.alone().state or trial.alone().draws:  # the second batch meets what the first left behind
        return
    other = Trial(trial.case, replace(trial.batch, seed=trial.batch.seed + 1), trial.worlds)
    mean = {name: (x + other.alone().encoder[name]) / 2 for name, x in trial.alone().encoder.items()}
    same_gradients(trial.alone(plan).encoder, mean, "the accumulated gradient", "the mean of both batches' own")


@law(catches="ignored grad_output")
def honours_grad_output(trial: Trial) -> None:
    """A loss times 3 has three times the gradient.

    When it fails, loss weights, gradient scalers and division by accumulation steps do nothing.
    """
    asked_of_losses(trial)
    tripled = {name: 3 * x for name, x in trial.reduced("encoder").items()}
    same_gradients(trial.reduced("encoder", Plan(scale=3.0)), tripled, "the gradient of 3 · loss", "3 · the gradient")


@law(catches="rank's own queue")
def same_state(trial: Trial) -> None:
    """Buffers (queues, centres, running statistics) are the same on every rank after a step, and as on one process.

    When it fails, ranks drift apart, and a checkpoint holds one rank's memory.
    """
    alone = trial.alone().state
    for rank, found in enumerate(trial.together()):
        same_gradients(found.state, alone, f"the loss's state on rank {rank}")


@law(catches="naive softmax")
def finite_at_extremes(trial: Trial) -> None:
    """Value and gradients are finite for zero rows, duplicates, huge and tiny norms, where one process's are.

    When it fails, one odd batch turns the model to NaN.
    """
    if not _is_finite(trial.alone()):
        raise NotTried("one process's numbers are not finite either")
    for rank, found in enumerate(trial.together()):
        if not _is_finite(found):
            raise Broken(f"rank {rank} has NaN or infinite numbers in its value or its gradients")


CONTRACT = (
    runs_on_every_split,
    same_value_on_every_rank,
    same_value,
    same_encoder_gradient,
    same_parameter_gradient,
    parameters_in_step,
)
"""The global-batch contract."""

OF_ONE_STEP = (
    *CONTRACT,
    blind_to_split,
    blind_to_rank_order,
    blind_to_row_order,
    accumulates,
    honours_grad_output,
    same_state,
    finite_at_extremes,
)
"""What must hold at one step, the most basic first."""

LAWS = (*OF_ONE_STEP, *OF_TRAININGS)
"""All laws."""


def _is_finite(found: Measurement) -> bool:
    numbers = [number(found.value), *found.encoder.values(), *found.parameters.values()]
    return all(bool(torch.isfinite(x).all()) for x in numbers)


def _order_is_free(trial: Trial) -> bool:
    """Whether one process, too, computes the same from shuffled rows."""
    ours, theirs = number(trial.alone().value), number(trial.alone(Plan(shuffle_rows=True)).value)
    return torch.allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)


def _same_outcome(trial: Trial, plan: Plan, how: str) -> None:
    ours, theirs = trial.together(AS_IS)[0].value, trial.together(plan)[0].value
    close(number(theirs), number(ours), f"{how}, rank 0 returns", "as it was")
    what = f"{how}, the encoder's gradient"
    same_gradients(trial.reduced("encoder", plan), trial.reduced("encoder"), what, "as it was")


__all__ = [
    "CONTRACT",
    "LAWS",
    "OF_ONE_STEP",
    "OF_TRAININGS",
    "TOLERANCE",
    "Broken",
    "Law",
    "NotTried",
    "accumulates",
    "arguments_agree",
    "blind_to_rank_order",
    "blind_to_row_order",
    "blind_to_split",
    "draws_are_shared",
    "finite_at_extremes",
    "honours_grad_output",
    "parameters_agree",
    "parameters_in_step",
    "runs_on_every_split",
    "same_at_later_steps",
    "same_encoder_gradient",
    "same_messages",
    "same_parameter_gradient",
    "same_sharded_gradient",
    "same_state",
    "same_value",
    "same_value_on_every_rank",
    "settings_agree",
]
