"""The invariants of a global loss: functions that raise :class:`Broken` with the result and the value expected."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
from torch import Tensor

from contrastive_zoo.testing.evidence import Ratio
from contrastive_zoo.testing.measurement import UNCHANGED, Gradients, Measurement, Outcome, Plan, Trial
from contrastive_zoo.testing.worlds import RankError

MIN_STEPS = 4  # fewest steps of a training that is tested


class Broken(AssertionError):
    """An invariant is broken by this loss on this batch."""


class NotApplicable(Exception):
    """An invariant does not apply to this loss on this batch; the message says why."""


@dataclass(frozen=True)
class Invariant:
    """A named property of a loss, and a mistake that breaks it."""

    check: Callable[[Trial], None]  # raises Broken, or NotApplicable where the property does not apply
    catches: str  # key of the mistake in the repository's tools/gallery; the tests prove that it is caught

    @property
    def name(self) -> str:
        return self.check.__name__

    def __call__(self, trial: Trial) -> bool:
        """Test the invariant; return whether it applies."""
        try:
            self.check(trial)
        except NotApplicable:
            return False
        return True

    def __str__(self) -> str:
        return self.name


def invariant(*, catches: str) -> Callable[[Callable[[Trial], None]], Invariant]:
    return lambda check: Invariant(check, catches)


def require(applies: object, reason: str) -> None:
    if not applies:
        raise NotApplicable(reason)


def first_line(error: RankError) -> str:
    return str(error).partition("\n")[0]


def same(trial: Trial, actual: Gradients, expected: Gradients, what: str, source: str = "one process's") -> None:
    """Raise Broken if a tensor differs; ``source`` says where the expected ones come from."""
    for name, x in expected.items():
        close(trial, actual[name], x, f"{what} ({name}) is", source)


def close(trial: Trial, actual: Tensor | float, expected: Tensor | float, what: str, source: str) -> None:
    """Raise Broken if a result differs from the expected one by more than the tolerance of the trial."""
    x, y = (torch.as_tensor(each, dtype=torch.float64) for each in (actual, expected))
    if x.shape != y.shape:
        raise Broken(f"{what} of shape {list(x.shape)}; {source}: {list(y.shape)}")
    largest = max([1.0, *y.nan_to_num().abs().flatten().tolist()])
    if torch.allclose(x, y, rtol=0.0, atol=trial.tolerance * largest, equal_nan=True):
        return
    shown = [f"{each.item():.6g}" if x.numel() == 1 else f"of norm {each.norm().item():.6g}" for each in (x, y)]
    compared, error = Ratio.between(x.flatten(), y.flatten()), (x - y).abs().max().item()
    of_vector = f", ratio {compared.norms:.3g}, cosine {compared.cosine:.3g}"
    ratio = f", ratio {compared.ratio:.3g}" if x.numel() == 1 else of_vector
    measured = f" (difference {error:.2g}{ratio if x.any() and y.any() else ''})" if math.isfinite(error) else ""
    raise Broken(f"{what} {shown[0]}; {source}: {shown[1]}{measured}")


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
        close(trial, value, values[0], f"rank {rank} returns", "rank 0")


@invariant(catches="own slice × W")
def same_value(trial: Trial) -> None:
    """The returned value is what one process computes from the embeddings of all ranks.

    When it fails, losses and schedules of runs on different numbers of processes cannot be compared.
    """
    expected = trial.on_one_process().value
    for rank, result in enumerate(trial.on_ranks()):
        close(trial, result.value, expected, f"rank {rank} returns", "one process")


@invariant(catches="own slice")
def same_encoder_gradient(trial: Trial) -> None:
    """After the gradient all-reduce, the encoder's gradient is what one process computes.

    When it fails, W processes train a different model: a wrong factor changes the effective learning rate, a wrong
    direction changes what is learnt.
    """
    same(trial, trial.reduced("encoder"), trial.on_one_process().encoder, "the encoder's gradient")


@invariant(catches="own slice × W")
def same_parameter_gradient(trial: Trial) -> None:
    """After the gradient all-reduce, the gradient of the loss's own parameters is what one process computes.

    When it fails, temperature, proxies or class centres have another effective learning rate than the encoder.
    """
    expected = trial.on_one_process().parameters
    require(expected, "this loss has no parameters of its own")
    same(trial, trial.reduced("parameters"), expected, "the gradient of the loss's own parameters")


@invariant(catches="local parameters")
def same_parameter_gradient_on_every_rank(trial: Trial) -> None:
    """The gradient of the loss's own parameters is the same on every rank before any all-reduce.

    When it fails, each rank learns its own temperature wherever the trainer does not reduce these parameters (they are
    rarely inside the wrapped model), and the ranks compute different losses from then on.
    """
    first, *others = [result.parameters for result in trial.on_ranks()]
    require(first, "this loss has no parameters of its own")
    for rank, result in enumerate(others, 1):
        same(trial, result, first, f"the gradient of the loss's own parameters on rank {rank}", "rank 0's")


@invariant(catches="overwritten tensors")
def gradients_accumulate(trial: Trial) -> None:
    """Two forward passes, then two backward passes, give the gradient of one pass after the other.

    When it fails, gradient accumulation, and models that call the loss twice, get wrong gradients.
    """
    plan = Plan(second_seed=trial.batch.seed + 1)
    require(not trial.no_reference(plan), "one process raises, or is not finite, on the second batch")
    expected = trial.reduced("encoder", replace(plan, one_by_one=True))
    same(trial, trial.reduced("encoder", plan), expected, "the accumulated gradient", "one pass after the other")


@invariant(catches="ignored grad_output")
def scales_with_grad_output(trial: Trial) -> None:
    """The gradient of 3 · loss is 3 times the gradient of the loss.

    When it fails, loss weights, gradient scalers and division by accumulation steps have no effect.
    """
    tripled = {name: 3 * x for name, x in trial.reduced("encoder").items()}
    same(trial, trial.reduced("encoder", Plan(scale=3.0)), tripled, "the gradient of 3 · loss", "3 · the gradient")


@invariant(catches="rank's own queue")
def same_state(trial: Trial) -> None:
    """Buffers (queues, centres, running statistics) after a step equal those of one process, on every rank.

    When it fails, ranks diverge, and a checkpoint stores the buffers of one rank.
    """
    expected = trial.on_one_process().state
    require(expected, "this loss has no buffers")
    for rank, result in enumerate(trial.on_ranks()):
        same(trial, result.state, expected, f"the loss's state on rank {rank}")


@invariant(catches="naive softmax")
def finite_at_extremes(trial: Trial) -> None:
    """Value and gradients are finite for zero rows, duplicates, huge and tiny norms, wherever those of one process are.

    When it fails, a single unusual batch turns the model's parameters to NaN.
    """
    require(trial.on_one_process().is_finite, "the value or gradients of one process are not finite")
    for rank, result in enumerate(trial.on_ranks()):
        if not result.is_finite:
            raise Broken(f"rank {rank} has NaN or infinite numbers in its value or its gradients")


@invariant(catches="scaled from call 3")
def same_at_later_steps(trial: Trial) -> None:
    """Value and gradients equal those of one process at every step of a training in which shard sizes change.

    When it fails, the first step is right and a later one is not: a rank reuses sizes, buffers or a path of an earlier
    step.
    """
    _same_training(trial)


@invariant(catches="own random stream")
def same_random_numbers(trial: Trial) -> None:
    """A loss with random numbers uses those of one process, on every rank and at every step.

    When it fails, a run cannot be repeated on another number of processes. In the test the random states of the ranks
    differ, as after data loading; a check reports it only if the expected value or gradient is wrong too. Applies only to
    losses with random numbers.
    """
    draws = any(isinstance(x, Measurement) and x.drew_random_numbers for x in trial.train_on_one_process())
    require(draws, "this loss draws no random numbers")
    _same_training(trial, Plan(first_seed=0))


@invariant(catches="sharded weights, W×")
def same_sharded_gradient(trial: Trial) -> None:
    """The gradients of a sharded parameter, concatenated over ranks, equal the gradient of one process.

    When it fails, sharded class weights have another effective learning rate than the encoder. Applies only to losses with
    sharded parameters; such a module has an attribute ``sharded = True``.
    """
    for step, reference, by_rank in _steps(trial):
        shards = [result.sharded for result in by_rank]
        require(any(shards), "this loss has no sharded parameters")
        whole = {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}
        expected = reference.sharded or {name: reference.parameters[name] for name in whole}
        same(trial, whole, expected, f"at step {step}, the gradient of sharded parameters")


@invariant(catches="one message more")
def same_messages(trial: Trial) -> None:
    """Every rank calls the same collectives in the same order, with equal element counts where the collective needs them.

    When it fails, a rank decides from local data what it sends: for some batch, ranks wait for each other, or match
    messages that do not belong together.
    """
    trained = _trained(trial, Plan(record=not trial.worlds.threads))
    first, *others = [
        [message for x in outcomes if isinstance(x, Measurement) for message in (*x.forward, *x.backward)]
        for outcomes in trained
    ]
    for rank, sent in enumerate(others, 1):
        for position, (message, of_rank_0) in enumerate(zip_longest(sent, first), 1):
            if message != of_rank_0:
                actual, expected = message or "missing", of_rank_0 or "missing"
                raise Broken(f"message {position} of rank {rank} is {actual}; rank 0's: {expected}")


@invariant(catches="views joined first")
def same_value_in_any_order(trial: Trial) -> None:
    """The value of a loss of one tensor stays the same if two samples, or two blocks of 48, change places.

    When it fails, the loss pairs samples by their place in the tensor, for example the first half with the second. On
    several ranks it then pairs the wrong ones. Applies only to losses of one tensor: labels or further tensors make pairs.
    """
    # a block holds whole groups of 2, 3, 4, 6, 8, 12, 16, 24 or 48 rows, and a sample stays in its group
    case, batch = trial.case, replace(trial.batch, shards=(48,) * 4)
    whole = Trial(case, batch, trial.worlds, trial.tolerance)
    is_of_one = case.call == "views" and case.views == 1 and trial.world_size > 1
    require(is_of_one and not whole.no_reference(), "labels or several tensors make pairs, or one process raises")
    expected = whole.on_one_process().value
    exchanged = [whole.on_one_process(Plan(edit=f"two {x} exchanged")).value for x in ("shards", "samples")]
    nearest = min(exchanged, key=lambda x: abs(x - expected))
    close(trial, nearest, expected, "after an exchange of samples one process returns", "before it")


def _trained(trial: Trial, plan: Plan) -> list[list[Outcome]]:
    is_training = trial.world_size > 1 and len(trial.training) >= MIN_STEPS
    require(is_training, "there is one rank only, or one process raises, or is not finite, at most steps")
    try:
        return trial.train_on_ranks(plan)
    except RankError as error:
        raise Broken(f"in a training of {len(trial.training)} steps, {first_line(error)}") from error


def _steps(trial: Trial, plan: Plan = UNCHANGED) -> Iterator[tuple[int, Measurement, list[Measurement]]]:
    """Yield each step's number and the measurements of one process and of all ranks; raise Broken if a rank raised."""
    by_step = list(zip(*_trained(trial, plan), strict=True))
    for step, (reference, outcomes) in enumerate(zip(trial.train_on_one_process(plan), by_step, strict=True), 1):
        assert isinstance(reference, Measurement), "trial.training has only steps that one process computes"
        for rank, outcome in enumerate(outcomes):
            if isinstance(outcome, str):
                raise Broken(f"one process computes a value at step {step}, but rank {rank} raised {outcome}")
        yield step, reference, [outcome for outcome in outcomes if isinstance(outcome, Measurement)]


def _same_training(trial: Trial, plan: Plan = UNCHANGED) -> None:
    """Compare value, gradients and state of every rank at every step with one process."""
    for step, reference, by_rank in _steps(trial, plan):
        for rank, result in enumerate(by_rank):
            close(trial, result.value, reference.value, f"at step {step}, rank {rank} returns", "one process")
            same(trial, result.state, reference.state, f"at step {step}, the loss's state on rank {rank}")
        for of in ("encoder", "parameters"):
            reduced = trial.reduce([getattr(result, of) for result in by_rank])
            expected = {name: x for name, x in getattr(reference, of).items() if name in reduced}
            same(trial, reduced, expected, f"at step {step}, the gradient of the {of}")


CONTRACT = (
    runs_on_every_split,
    same_value_on_every_rank,
    same_value,
    same_encoder_gradient,
    same_parameter_gradient,
    same_parameter_gradient_on_every_rank,
)
"""The global-batch contract."""

# the most basic first
STEP_INVARIANTS = (*CONTRACT, gradients_accumulate, scales_with_grad_output, same_state, finite_at_extremes)
TRAINING_INVARIANTS = (
    *(same_at_later_steps, same_random_numbers, same_sharded_gradient, same_messages, same_value_in_any_order),
)
INVARIANTS = (*STEP_INVARIANTS, *TRAINING_INVARIANTS)  # all invariants, of one step and of a training
OF_BACKWARD = (gradients_accumulate, scales_with_grad_output)  # those that several further passes test
# those that do not compare the random numbers of ranks with those of one process
OF_SAME_DRAWS = (runs_on_every_split, gradients_accumulate, scales_with_grad_output, finite_at_extremes, same_messages)
