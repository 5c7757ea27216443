"""The invariants of a global loss: functions that raise :class:`Broken` with the result and the value expected.

Each invariant names the mistake that it catches: a key of :mod:`contrastive_zoo.testing.gallery`, where the mistake is
written out. The tests prove that it is caught.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest

import torch

from contrastive_zoo.testing.invariant import TOLERANCE, Broken, close, first_line, invariant, require, same_gradients
from contrastive_zoo.testing.measurement import UNCHANGED, Measurement, Plan
from contrastive_zoo.testing.messages import Message
from contrastive_zoo.testing.trial import Fault, Outcome, StepError, Training, Trial
from contrastive_zoo.testing.worlds import RankError

MIN_STEPS = 4
"""Fewest steps of a training that is tested."""

# --- invariants of one step -------------------------------------------------------------------------------------------


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
        close(value, values[0], f"rank {rank} returns", "rank 0")


@invariant(catches="own slice × W")
def same_value(trial: Trial) -> None:
    """The returned value is what one process computes from the embeddings of all ranks.

    When it fails, losses and schedules of runs on different numbers of processes cannot be compared.
    """
    expected = trial.on_one_process().value
    for rank, result in enumerate(trial.on_ranks()):
        close(result.value, expected, f"rank {rank} returns", "one process")


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
    require(expected, "this loss has no parameters of its own")
    same_gradients(trial.reduced("parameters"), expected, "the gradient of the loss's own parameters")


@invariant(catches="local parameters")
def same_parameter_gradient_on_every_rank(trial: Trial) -> None:
    """The gradient of the loss's own parameters is the same on every rank before any all-reduce.

    When it fails, each rank learns its own temperature wherever the trainer does not reduce these parameters (they are
    rarely inside the wrapped model), and the ranks compute different losses from then on.
    """
    first, *others = [result.parameters for result in trial.on_ranks()]
    require(first, "this loss has no parameters of its own")
    for rank, result in enumerate(others, 1):
        same_gradients(result, first, f"the gradient of the loss's own parameters on rank {rank}", "rank 0's")


@invariant(catches="mean of means")
def invariant_to_split(trial: Trial) -> None:
    """The loss and its gradient do not depend on how the samples are split over the ranks.

    When it fails, samples have another weight in the last, smaller batch of an epoch, or with an uneven sampler.
    """
    total, world_size = trial.batch.total, trial.world_size
    even = tuple(total // world_size + (rank < total % world_size) for rank in range(world_size))
    require(even != trial.batch.shards, "this batch is split evenly")
    _same_outcome(trial, Plan(shards=even), f"split evenly, {list(even)}")


@invariant(catches="mask without offset")
def invariant_to_rank_order(trial: Trial) -> None:
    """The loss and its gradient do not depend on which rank holds which shard.

    When it fails, which samples are compared depends on the rank that holds them. Applies only to losses that do not
    depend on the order of samples on one process.
    """
    rotated = Plan(rank_order=tuple((rank + 1) % trial.world_size for rank in range(trial.world_size)))
    require(_order_is_free(trial, rotated), "the value of one process depends on the order of samples")
    _same_outcome(trial, rotated, "with shards rotated by one rank")


@invariant(catches="views split wrongly")
def invariant_to_sample_order(trial: Trial) -> None:
    """The loss and its gradient do not depend on the order of the samples.

    When it fails, the loss uses positions where it should use sample ids: a diagonal, an offset, a tie. Applies only to
    losses that do not depend on the order of samples on one process.
    """
    shuffled = Plan(shuffle_samples=True)
    require(_order_is_free(trial, shuffled), "the value of one process depends on the order of samples")
    _same_outcome(trial, shuffled, "with all samples shuffled")


@invariant(catches="overwritten tensors")
def gradients_accumulate(trial: Trial) -> None:
    """Two forward passes, then two backward passes, give the mean of both gradients.

    When it fails, gradient accumulation, and models that call the loss twice, get wrong gradients.
    """
    require(not trial.case.step, "applies to losses, not to training steps")
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
    require(not trial.case.step, "applies to losses, not to training steps")
    tripled = {name: 3 * x for name, x in trial.reduced("encoder").items()}
    same_gradients(trial.reduced("encoder", Plan(scale=3.0)), tripled, "the gradient of 3 · loss", "3 · the gradient")


@invariant(catches="rank's own queue")
def same_state(trial: Trial) -> None:
    """Buffers (queues, centres, running statistics) after a step equal those of one process, on every rank.

    When it fails, ranks diverge, and a checkpoint stores the buffers of one rank.
    """
    expected = trial.on_one_process().state
    require(expected, "this loss has no buffers")
    for rank, result in enumerate(trial.on_ranks()):
        same_gradients(result.state, expected, f"the loss's state on rank {rank}")


@invariant(catches="naive softmax")
def finite_at_extremes(trial: Trial) -> None:
    """Value and gradients are finite for zero rows, duplicates, huge and tiny norms, wherever those of one process are.

    When it fails, a single unusual batch turns the model's parameters to NaN.
    """
    require(_is_finite(trial.on_one_process()), "the value or gradients of one process are not finite")
    for rank, result in enumerate(trial.on_ranks()):
        if not _is_finite(result):
            raise Broken(f"rank {rank} has NaN or infinite numbers in its value or its gradients")


def _is_finite(result: Measurement) -> bool:
    tensors = [torch.tensor(result.value), *result.encoder.values(), *result.parameters.values()]
    return all(bool(torch.isfinite(x).all()) for x in tensors)


def _order_is_free(trial: Trial, plan: Plan) -> bool:
    """Return whether the value of one process does not depend on the order of samples that a plan changes.

    Random numbers are assigned to samples by position: with them the values are equal by coincidence only.
    """
    result = trial.on_one_process()
    if result.drew_random_numbers:
        return False
    x, y = torch.tensor([result.value, trial.on_one_process(plan).value], dtype=torch.float64)
    return torch.allclose(x, y, rtol=TOLERANCE, atol=TOLERANCE)


def _same_outcome(trial: Trial, plan: Plan, variation: str) -> None:
    """Require that value and encoder gradient on W ranks do not change under a plan."""
    value, varied = (trial.on_ranks(x)[0].value for x in (UNCHANGED, plan))
    close(varied, value, f"{variation}, rank 0 returns", "unchanged")
    what = f"{variation}, the encoder's gradient"
    same_gradients(trial.reduced("encoder", plan), trial.reduced("encoder"), what, "unchanged")


# --- invariants of a training -------------------------------------------------------------------------------------------


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
    require(not trial.case.step, "applies to losses, not to training steps")
    outcomes = trial.train_on_one_process(training)
    draws = any(isinstance(x, Measurement) and x.drew_random_numbers for x in outcomes)
    require(draws, "this loss draws no random numbers")
    _same_training(trial, training)


@invariant(catches="sharded weights, W×")
def same_sharded_gradient(trial: Trial) -> None:
    """The gradients of a sharded parameter, concatenated over ranks, equal the gradient of one process.

    When it fails, sharded class weights have another effective learning rate than the encoder. Applies only to losses with
    sharded parameters; such a module has an attribute ``sharded = True``.
    """
    is_sharded = trial.traits.sharded or any(result.sharded for result in trial.on_ranks())
    require(is_sharded, "this loss has no sharded parameters")
    for step, reference, outcomes in _steps(trial, trial.training):
        shards = [result.sharded for result in _measured(outcomes, step)]
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
    name = trial.traits.parameter or ""
    require(name, "this loss has no parameters that every rank holds")
    _require_same_error(trial, "parameter", name, first=1, last=2)


@invariant(catches="arguments not compared")
def arguments_agree(trial: Trial) -> None:
    """An argument that is missing on one rank at a later step raises the same ValueError on all ranks, at that call.

    When it fails, the other ranks wait for that rank until the process group's timeout, or the process is aborted.
    Applies only to wrappers.
    """
    _require_wrapper(trial)
    _require_same_error(trial, "argument", "the last argument", last=3)


@invariant(catches="one message more")
def same_messages(trial: Trial) -> None:
    """Every rank calls the same collectives in the same order, with equal element counts where the collective needs them.

    When it fails, a rank decides from local data what it sends: for some batch, ranks wait for each other, or match
    messages that do not belong together.
    """
    trained = _trained(trial, replace(trial.training, record_collectives=True))
    first, *others = [messages for _, messages in trained]
    for rank, sent in enumerate(others, 1):
        for position, (message, of_rank_0) in enumerate(zip_longest(sent, first), 1):
            if message != of_rank_0:
                raise Broken(
                    f"message {position} of rank {rank} is {message or 'missing'}; rank 0's: {of_rank_0 or 'missing'}"
                )


def _require_wrapper(trial: Trial) -> None:
    require(trial.world_size > 1, "there is no other rank to differ from")
    require(trial.traits.is_wrapper, "applies to wrappers with an option grad_reduction")


def _trained(trial: Trial, training: Training) -> list[tuple[list[Outcome], list[Message]]]:
    is_training = trial.world_size > 1 and len(training.steps) >= MIN_STEPS
    require(is_training, "there is one rank only, or one process raises at most steps")
    try:
        return trial.train_on_ranks(training)
    except RankError as error:
        raise Broken(f"in a training of {len(training.steps)} steps, {first_line(error)}") from error


def _steps(trial: Trial, training: Training) -> Iterator[tuple[int, Measurement, tuple[Outcome, ...]]]:
    """Yield for each step its number, the measurement of one process, and the outcomes of the ranks."""
    by_step = list(zip(*(outcomes for outcomes, _ in _trained(trial, training)), strict=True))
    for step, reference in enumerate(trial.train_on_one_process(training)):
        assert isinstance(reference, Measurement), "trial.training has only steps that one process computes"
        yield step + 1, reference, by_step[step]


def _measured(outcomes: tuple[Outcome, ...], step: int) -> list[Measurement]:
    """Return the measurements of all ranks at one step; raise Broken if a rank raised."""
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, StepError):
            raise Broken(f"one process computes a value at step {step}, but rank {rank} raised {outcome.message}")
    return [outcome for outcome in outcomes if isinstance(outcome, Measurement)]


def _same_training(trial: Trial, training: Training) -> None:
    """Compare value, gradients and state of every rank at every step with one process."""
    for step, reference, outcomes in _steps(trial, training):
        by_rank = _measured(outcomes, step)
        for rank, result in enumerate(by_rank):
            close(result.value, reference.value, f"at step {step}, rank {rank} returns", "one process")
            same_gradients(result.state, reference.state, f"at step {step}, the loss's state on rank {rank}")
        for what in ("encoder", "parameters"):
            reduced = trial.reduce([getattr(result, what) for result in by_rank])
            expected = {name: x for name, x in getattr(reference, what).items() if name in reduced}
            same_gradients(reduced, expected, f"at step {step}, the gradient of the {what}")


def _require_same_error(trial: Trial, fault: Fault, name: str, *, first: int = 3, last: int = 4) -> None:
    """Require the same ValueError on all ranks for a fault of one rank, and right values before and after it."""
    training = replace(trial.training, fault=fault, fault_steps=tuple(range(first - 1, last)))
    what = f"{name} {'is missing' if fault == 'argument' else 'differs'} on rank {trial.world_size - 1}"
    steps, raised = list(_steps(trial, training)), False
    for step, _, outcomes in steps[first - 1 : last]:
        errors = [x.message if isinstance(x, StepError) else None for x in outcomes]
        if len(set(errors)) > 1:
            by_rank = "; ".join(f"rank {rank} {'raised ' + e if e else 'continued'}" for rank, e in enumerate(errors))
            raise Broken(f"{what} at step {step}, and ranks do not raise the same error: {by_rank}")
        raised = raised or bool(errors[0])
    if not raised:
        raise Broken(f"{what} from step {first} on, and no rank raises")
    for step, reference, outcomes in steps:
        if first <= step <= last or reference.state or reference.drew_random_numbers:
            continue  # a step that raises changes no state, so later steps of a stateful loss differ
        for rank, result in enumerate(_measured(outcomes, step)):
            context = f"{what} at step {first}; at step {step}, rank {rank} returns"
            close(result.value, reference.value, context, "one process")


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

INVARIANTS = (*STEP_INVARIANTS, *TRAINING_INVARIANTS)
"""All invariants, of one step and of a training."""
