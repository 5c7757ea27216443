"""The invariants of a global loss: functions that raise :class:`Broken` with the value found and the value expected.

Each invariant names the mistake that it catches: a key of :mod:`contrastive_zoo.testing.gallery`, where the mistake is
written out. The tests prove that it is caught.
"""

from dataclasses import replace

import torch

from contrastive_zoo.testing.invariant import (
    TOLERANCE,
    Broken,
    Invariant,
    NotApplicable,
    close,
    first_line,
    invariant,
    number,
    require_loss,
    same_gradients,
)
from contrastive_zoo.testing.measurement import UNCHANGED, Measurement, Plan
from contrastive_zoo.testing.training_invariants import (
    TRAINING_INVARIANTS,
    arguments_agree,
    parameters_agree,
    same_at_later_steps,
    same_messages,
    same_random_numbers,
    same_sharded_gradient,
    settings_agree,
)
from contrastive_zoo.testing.trial import Trial
from contrastive_zoo.testing.worlds import RankError


@invariant(catches="early return")
def runs_on_every_split(trial: Trial) -> None:
    """W processes compute a value wherever one process does: no rank raises or hangs on uneven and empty shards.

    When it fails, training stops at the end of an epoch, or at the first batch in which some rank has no valid pair.
    """
    trial.on_one_process()
    try:
        trial.on_ranks()
    except RankError as error:
        raise Broken(f"one process computes a value, but {first_line(error)}") from error


@invariant(catches="local loss")
def same_value_on_every_rank(trial: Trial) -> None:
    """Every rank returns the same value.

    When it fails, the logged value is one rank's local loss, and early stopping or a scheduler may differ between ranks.
    """
    values = [result.value for result in trial.on_ranks()]
    for rank, value in enumerate(values):
        close(number(value), number(values[0]), f"rank {rank} returns", "rank 0")


@invariant(catches="own slice × W")
def same_value(trial: Trial) -> None:
    """The returned value is what one process computes from the embeddings of all ranks.

    When it fails, losses and schedules of runs on different numbers of processes cannot be compared.
    """
    expected = trial.on_one_process().value
    for rank, result in enumerate(trial.on_ranks()):
        close(number(result.value), number(expected), f"rank {rank} returns", "one process")


@invariant(catches="own slice")
def same_encoder_gradient(trial: Trial) -> None:
    """After the gradient all-reduce, the encoder's gradient is what one process computes.

    When it fails, W processes train a different model: a wrong factor changes the effective learning rate, a wrong
    direction changes what is learnt.
    """
    same_gradients(trial.reduced("encoder"), trial.on_one_process().encoder, "the encoder's gradient")


@invariant(catches="own slice × W")
def same_parameter_gradient(trial: Trial) -> None:
    """After the gradient all-reduce, the gradient of the loss's own parameters is what one process computes.

    When it fails, temperature, proxies or class centres have another effective learning rate than the encoder.
    """
    expected = trial.on_one_process().parameters
    if not expected:
        raise NotApplicable("this loss has no parameters of its own")
    same_gradients(trial.reduced("parameters"), expected, "the gradient of the loss's own parameters")


@invariant(catches="local parameters")
def same_parameter_gradient_on_every_rank(trial: Trial) -> None:
    """The gradient of the loss's own parameters is the same on every rank before any all-reduce.

    When it fails, each rank learns its own temperature wherever the trainer does not reduce these parameters (they are
    rarely inside the wrapped model), and the ranks compute different losses from then on.
    """
    first, *others = [result.parameters for result in trial.on_ranks()]
    if not first:
        raise NotApplicable("this loss has no parameters of its own")
    for rank, result in enumerate(others, 1):
        same_gradients(result, first, f"the gradient of the loss's own parameters on rank {rank}", "rank 0's")


@invariant(catches="mean of means")
def invariant_to_split(trial: Trial) -> None:
    """The loss and its gradient do not depend on how the samples are split over the ranks.

    When it fails, samples have another weight in the last, smaller batch of an epoch, or with an uneven sampler.
    """
    total, world_size = trial.batch.total, trial.world_size
    even = tuple(total // world_size + (rank < total % world_size) for rank in range(world_size))
    if even == trial.batch.shards:
        raise NotApplicable("this batch is split evenly")
    _same_outcome(trial, Plan(shards=even), f"split evenly, {list(even)}")


@invariant(catches="mask without offset")
def invariant_to_rank_order(trial: Trial) -> None:
    """The loss and its gradient do not depend on which rank holds which shard.

    When it fails, which samples are compared depends on the rank that holds them. Applies only to losses that do not
    depend on the order of samples on one process.
    """
    if not _order_is_free(trial):
        raise NotApplicable("the value of one process depends on the order of samples")
    rotated = tuple((rank + 1) % trial.world_size for rank in range(trial.world_size))
    _same_outcome(trial, Plan(rank_order=rotated), "with shards rotated by one rank")


@invariant(catches="views split wrongly")
def invariant_to_sample_order(trial: Trial) -> None:
    """The loss and its gradient do not depend on the order of the samples.

    When it fails, the loss uses positions where it should use sample ids: a diagonal, an offset, a tie. Applies only to
    losses that do not depend on the order of samples on one process.
    """
    if not _order_is_free(trial):
        raise NotApplicable("the value of one process depends on the order of samples")
    _same_outcome(trial, Plan(shuffle_samples=True), "with all samples shuffled")


@invariant(catches="overwritten tensors")
def gradients_accumulate(trial: Trial) -> None:
    """Two forward passes, then two backward passes, give the mean of both gradients.

    When it fails, gradient accumulation, and models that call the loss twice, get wrong gradients.
    """
    require_loss(trial)
    plan = Plan(second_seed=trial.batch.seed + 1)
    same_gradients(trial.reduced("encoder", plan), trial.on_one_process(plan).encoder, "the accumulated gradient")
    first = trial.on_one_process()
    if first.state or first.drew_random_numbers:  # the second batch depends on the state after the first
        return
    other = Trial(trial.case, replace(trial.batch, seed=trial.batch.seed + 1), trial.worlds)
    mean = {name: (x + other.on_one_process().encoder[name]) / 2 for name, x in first.encoder.items()}
    same_gradients(trial.on_one_process(plan).encoder, mean, "the accumulated gradient", "the mean of both batches")


@invariant(catches="ignored grad_output")
def scales_with_grad_output(trial: Trial) -> None:
    """The gradient of 3 · loss is 3 times the gradient of the loss.

    When it fails, loss weights, gradient scalers and division by accumulation steps have no effect.
    """
    require_loss(trial)
    tripled = {name: 3 * x for name, x in trial.reduced("encoder").items()}
    same_gradients(trial.reduced("encoder", Plan(scale=3.0)), tripled, "the gradient of 3 · loss", "3 · the gradient")


@invariant(catches="rank's own queue")
def same_state(trial: Trial) -> None:
    """Buffers (queues, centres, running statistics) after a step equal those of one process, on every rank.

    When it fails, ranks diverge, and a checkpoint stores the buffers of one rank.
    """
    expected = trial.on_one_process().state
    if not expected:
        raise NotApplicable("this loss has no buffers")
    for rank, result in enumerate(trial.on_ranks()):
        same_gradients(result.state, expected, f"the loss's state on rank {rank}")


@invariant(catches="naive softmax")
def finite_at_extremes(trial: Trial) -> None:
    """Value and gradients are finite for zero rows, duplicates, huge and tiny norms, wherever those of one process are.

    When it fails, a single unusual batch turns the model's parameters to NaN.
    """
    if not _is_finite(trial.on_one_process()):
        raise NotApplicable("the value or gradients of one process are not finite")
    for rank, result in enumerate(trial.on_ranks()):
        if not _is_finite(result):
            raise Broken(f"rank {rank} has NaN or infinite numbers in its value or its gradients")


CONTRACT = (
    runs_on_every_split,
    same_value_on_every_rank,
    same_value,
    same_encoder_gradient,
    same_parameter_gradient,
    same_parameter_gradient_on_every_rank,
)
"""The global-batch contract."""

STEP_INVARIANTS = (
    *CONTRACT,
    invariant_to_split,
    invariant_to_rank_order,
    invariant_to_sample_order,
    gradients_accumulate,
    scales_with_grad_output,
    same_state,
    finite_at_extremes,
)
"""The invariants of one step, the most basic first."""

INVARIANTS = (*STEP_INVARIANTS, *TRAINING_INVARIANTS)
"""All invariants, of one step and of a training."""


def _is_finite(found: Measurement) -> bool:
    numbers = [number(found.value), *found.encoder.values(), *found.parameters.values()]
    return all(bool(torch.isfinite(x).all()) for x in numbers)


def _order_is_free(trial: Trial) -> bool:
    """Return whether the value of one process does not depend on the order of samples.

    Random numbers are assigned to samples by position: with them the values are equal by coincidence only.
    """
    result = trial.on_one_process()
    if result.drew_random_numbers:
        return False
    value, shuffled = number(result.value), number(trial.on_one_process(Plan(shuffle_samples=True)).value)
    return torch.allclose(value, shuffled, rtol=TOLERANCE, atol=TOLERANCE)


def _same_outcome(trial: Trial, plan: Plan, variation: str) -> None:
    """Require that value and encoder gradient on W ranks do not change under a plan."""
    value, varied = (trial.on_ranks(x)[0].value for x in (UNCHANGED, plan))
    close(number(varied), number(value), f"{variation}, rank 0 returns", "unchanged")
    what = f"{variation}, the encoder's gradient"
    same_gradients(trial.reduced("encoder", plan), trial.reduced("encoder"), what, "unchanged")


__all__ = [
    "CONTRACT",
    "INVARIANTS",
    "STEP_INVARIANTS",
    "TOLERANCE",
    "TRAINING_INVARIANTS",
    "Broken",
    "Invariant",
    "NotApplicable",
    "arguments_agree",
    "finite_at_extremes",
    "gradients_accumulate",
    "invariant_to_rank_order",
    "invariant_to_sample_order",
    "invariant_to_split",
    "parameters_agree",
    "runs_on_every_split",
    "same_at_later_steps",
    "same_encoder_gradient",
    "same_messages",
    "same_parameter_gradient",
    "same_parameter_gradient_on_every_rank",
    "same_random_numbers",
    "same_sharded_gradient",
    "same_state",
    "same_value",
    "same_value_on_every_rank",
    "scales_with_grad_output",
    "settings_agree",
]
