"""The measurements of a loss on a global batch and in a training of a few steps, on one process and on W ranks."""

import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from contrastive_zoo.loss_base.loss_modules import LossModules
from contrastive_zoo.ranks.randomness import random_states
from contrastive_zoo.ranks.world import World
from contrastive_zoo.testing.batch import FEATURES, GlobalBatch, training_of
from contrastive_zoo.testing.evidence import noisy, tolerance
from contrastive_zoo.testing.interventions import EDITS, splitting
from contrastive_zoo.testing.messages import Message, Messages, allow_repeated_samples
from contrastive_zoo.testing.worlds import RankError, Worlds

Call = Literal["labels", "views"]
GradReduction = Literal["mean", "sum"]
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A loss under test. ``make`` returns it, a callable of the local embeddings, on every rank, with the same seed."""

    make: Callable[[], Any]
    call: Call = "labels"  # "labels" for loss(embeddings, labels), "views" for loss(view1, view2, …)
    grad_reduction: GradReduction = "mean"  # how the trainer reduces gradients over ranks
    views: int = 2  # number of views, for call="views"; 3 for loss(anchor, positive, negative)
    name: str = "loss"  # in reports
    repetitions: int = 0  # calls that are averaged, with other random numbers on each rank; 0 for one call

    @property
    def called(self) -> str:
        views, labels = f"{self.views} view(s); pass call='labels'", "embeddings and labels; pass call='views'"
        return f"was called with {views if self.call == 'views' else labels} if that is wrong"


COMPARED = "encoder", "parameters", "sharded", "state"  # the tensors of a measurement that one process must have, too


@dataclass
class Measurement:
    value: float
    encoder: Gradients  # after the local backward pass
    parameters: Gradients  # of the loss's own parameters that are replicated on every rank
    sharded: Gradients = field(default_factory=dict)  # of the local shard of the loss's sharded parameters
    state: Gradients = field(default_factory=dict)  # the loss's buffers after the step
    forward: Sequence[Message] = ()  # until the loss returned, if recorded
    backward: Sequence[Message] = ()  # after that
    drew_random_numbers: bool = False  # from a global generator
    random_operations: bool = False  # whether any generator is drawn from, if recorded
    grad_reduction: str | None = None  # the option of this name, if the loss has one
    precision: torch.dtype = torch.float64  # the narrowest dtype in which the loss computes, if recorded
    noise: float = 0.0  # the standard error of an average, as a difference of two measurements is counted

    @property
    def is_finite(self) -> bool:
        numbers = [torch.tensor(self.value), *self.encoder.values(), *self.parameters.values()]
        return all(bool(x.isfinite().all()) for x in numbers)

    def tensors(self) -> Gradients:
        named = {f"{group}.{name}": x for group in COMPARED for name, x in getattr(self, group).items()}
        return {"value": torch.tensor(self.value, dtype=torch.float64), **named}


Outcome = Measurement | str  # what a step computes, or the message of the error in which it ended


@dataclass(frozen=True)
class Plan:
    """Variations of a measurement."""

    scale: float = 1.0  # of the loss
    second_seed: int | None = None  # of a second batch; the mean of both is the loss
    one_by_one: bool = False  # whether the first backward pass runs before the second forward pass
    record: bool = False  # messages of a process, the precision and draws, which slows every operation down
    edit: str = ""  # a key of interventions.EDITS
    rounding: tuple[int, torch.dtype] | None = None  # a seed, and the dtype by half a unit of which embeddings change
    first_seed: int | None = None  # of the steps' random numbers on rank 0, and one more on each further rank


UNCHANGED = Plan()
# Of every parameter after each step, so that results of the old ones are wrong at the next step
PARAMETER_FACTOR = 0.95


def measure(case: Case, steps: Sequence[GlobalBatch], plan: Plan) -> list[Outcome]:
    """Construct the loss once, and call it on the local shard of each step's batch; runs on every rank."""
    world = World.of()
    if case.repetitions:
        # no rank ever has the random numbers of another rank, or of one process
        seeds = [10**6 * world.size + world.size * draw for draw in range(case.repetitions)]
        once = replace(case, repetitions=0)
        drawn = [measure(once, steps, replace(plan, first_seed=seed))[0] for seed in seeds]
        return [average([x for x in drawn if isinstance(x, Measurement)])]
    # one process may raise anything: the step is then left out. Several ranks may raise only a ValueError.
    expected_errors = () if len(steps) == 1 else Exception if world.size == 1 else ValueError
    outcomes: list[Outcome] = []
    batches = [[x] if plan.second_seed is None else [x, replace(x, seed=plan.second_seed)] for x in steps]
    subject = Subject(case, steps[0].d, plan.rounding)
    if plan.first_seed is not None:
        set_float64_and_seed(plan.first_seed + world.rank)
    for index, of_step in enumerate(batches):
        # every second step takes the general path, in which ranks split the work; the batch says which is first
        with splitting(always=(index + steps[0].seed) % 2 == 0):
            try:
                outcomes.append(subject.measure([local_shard(case, x, plan) for x in of_step], plan))
            except expected_errors as error:
                outcomes.append(str(error))
        subject.end_step()
    return outcomes


def average(results: Sequence[Measurement]) -> Measurement:
    first, drawn = results[0], [x.tensors() for x in results]
    noise, means = 0.0, {}
    for name in first.tensors():
        stacked = torch.stack([x[name] for x in drawn]).double()
        means[name] = stacked.mean(0)
        if stacked.numel():
            error = float(stacked.std(0).max()) / len(results) ** 0.5
            noise = max(noise, error / max(1.0, float(means[name].abs().max())))
    groups: dict[str, Any] = {x: {name: means[f"{x}.{name}"] for name in getattr(first, x)} for x in COMPARED}
    return replace(first, value=float(means["value"]), noise=noise, **groups)


def set_float64_and_seed(number: int = 0) -> None:
    torch.set_default_dtype(torch.float64)
    # torch.manual_seed records the caller's stack for a later CUDA start, which takes longer than a loss
    of_torch = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
    for seed in (of_torch, np.random.seed, random.seed):
        seed(number)


class Subject:
    """A loss and an encoder in float64, with the same seed on every rank."""

    def __init__(self, case: Case, d: int, rounding: tuple[int, torch.dtype] | None = None) -> None:
        set_float64_and_seed()
        self.loss = case.make()
        allow_repeated_samples(self.loss)
        self.encoder, self.rounding = Encoder(d), rounding
        self.module = self.loss.double() if isinstance(self.loss, nn.Module) else nn.Module()

    def measure(self, shards: Sequence[Sequence[Tensor]], plan: Plan) -> Measurement:
        """Run forward and backward on the samples of this rank; of several batches, the mean is the loss."""
        messages, states = Messages(same_draws=plan.edit == "same draws"), random_states()
        values: list[Tensor] = []
        returned = 0  # number of messages at the time
        for batches in [[x] for x in shards] if plan.one_by_one else [shards]:
            with messages if plan.record or messages.same_draws else nullcontext():
                called = [self.value(x) for x in batches]
                returned = returned or len(messages.sent)
                for value in called:
                    (plan.scale * value / len(shards)).backward()
            values += called
        replicated, sharded = split_parameters(self.module, gradients(self.module.named_parameters()))
        # what ranks share: without a pointer into an empty queue, which nothing sets
        shared = LossModules(self.module)
        return Measurement(
            sum(float(value.detach()) for value in values) / len(values),
            gradients(self.encoder.named_parameters()),
            replicated,
            sharded,
            {name: x.detach().clone() for name, x in shared.shared_state().items() if not isinstance(x, nn.Parameter)},
            forward=messages.sent[:returned],
            backward=messages.sent[returned:],
            drew_random_numbers=not all(map(torch.equal, states, random_states())),
            random_operations=messages.draws > 0,
            grad_reduction=getattr(self.loss, "grad_reduction", None),
            precision=messages.precision,
        )

    @torch.no_grad()
    def end_step(self) -> None:
        for parameter in (*self.encoder.parameters(), *self.module.parameters()):
            parameter.mul_(PARAMETER_FACTOR)
            parameter.grad = None

    def value(self, samples: Sequence[Tensor]) -> Tensor:
        embeddings = [self.encoder(x) if x.is_floating_point() else x for x in samples]
        if self.rounding is not None:
            generator = torch.Generator().manual_seed(self.rounding[0])
            embeddings = [noisy(x, generator, torch.finfo(self.rounding[1]).eps) for x in embeddings]
        return scalar(self.loss(*embeddings))


def starting_tensors(case: Case, d: int) -> tuple[Gradients, Gradients]:
    """Return the loss's replicated parameters before a step, and its other tensors of floats; runs on every rank."""
    module = Subject(case, d).module
    parameters = {name: x.detach().clone() for name, x in module.named_parameters()}
    others = {
        f"{prefix}.{name}": x.detach().clone()
        for prefix, part in module.named_modules()
        for name, x in (part._buffers | vars(part)).items()
        if isinstance(x, Tensor) and x.is_floating_point()
    }
    return split_parameters(module, parameters)[0], others


class Encoder(nn.Module):
    """A linear encoder in which no embedding depends on the other samples, not even in the last bit, unlike in a matmul."""

    def __init__(self, d: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(FEATURES, d, dtype=torch.float64, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return sum((x[:, i : i + 1] * self.weight[i] for i in range(FEATURES)), torch.zeros(()))


def whole_batch(case: Case, batch: GlobalBatch) -> list[Tensor]:
    """Return the samples of all ranks, before the encoder: one tensor per view, or samples and labels."""
    return batch.samples(case.views) if case.call == "views" else [*batch.samples(), batch.classes()]


def local_shard(case: Case, batch: GlobalBatch, plan: Plan) -> list[Tensor]:
    """Return the samples of this rank, those of all ranks on one process."""
    world, parts = World.of(), [EDITS[plan.edit](list(x.split(list(batch.shards)))) for x in whole_batch(case, batch)]
    return [torch.cat(x) if world.size == 1 else x[world.rank] for x in parts]


def scalar(value: Any) -> Tensor:
    """Return the loss from the result of a call: the result itself, or the first entry of a tuple or dict."""
    if isinstance(value, (int, float)):
        return torch.tensor(float(value))
    while not isinstance(value, Tensor):
        value = next(iter(value.values() if isinstance(value, dict) else value))
    return value


def gradients(parameters: Iterable[tuple[str, Tensor]]) -> Gradients:
    """Return the gradients by name, zero for a parameter without one."""
    named = ((name, x) for name, x in parameters if x.requires_grad)
    return {name: torch.zeros_like(x) if x.grad is None else x.grad.clone() for name, x in named}


def split_parameters(module: nn.Module, tensors: Gradients) -> tuple[Gradients, Gradients]:
    """Split tensors by name into those of replicated and of sharded parameters, whose module has ``sharded = True``."""
    sharded = {
        f"{prefix}{'.' * bool(prefix)}{name}"
        for prefix, part in module.named_modules()
        if getattr(part, "sharded", False) is True and not hasattr(part, "grad_reduction")
        for name, _ in part.named_parameters(recurse=False)
    }
    replicated = {name: x for name, x in tensors.items() if name not in sharded}
    return replicated, {name: x for name, x in tensors.items() if name in sharded}


TOLERANCE = 1e-10  # largest allowed difference in float64, relative to the larger of 1 and the largest expected element
REPETITIONS = 5  # repetitions with changes of up to half a unit of rounding, from which the tolerance is derived
SUM_ROUNDING = 4.0  # units of rounding by which sums of another order differ
DRAWS = 300  # calls of a loss with random numbers whose mean is compared
# Largest difference of two means, in standard errors of one: two right ones differ by more once in 30,000 numbers
STANDARD_ERRORS = 6.0
AVERAGE_TIMEOUT = 60.0  # seconds for these calls, at least


class Trial:
    """One loss on one global batch: each measurement is made once, and a rank that fails is a RankError."""

    def __init__(
        self, case: Case, batch: GlobalBatch, worlds: Worlds, tolerance: float = TOLERANCE, note: str = ""
    ) -> None:
        self.case, self.batch, self.worlds, self.world_size = case, batch, worlds, len(batch.shards)
        self.tolerance = tolerance  # of a right result, relative to the larger of 1 and the largest expected element
        self.note = note  # why the tolerance is not that of float64
        self._results: dict[Any, list[list[Outcome]]] = {}

    @cached_property
    def with_noise(self) -> "Trial | None":
        """The trial with the tolerance that measured noise gives; None if the loss computes exactly."""
        if self.draws:  # it is right if its expected value is: the means of many calls are compared
            result = Trial(replace(self.case, repetitions=DRAWS), self.batch, self.worlds)
            result.note = f"draws random numbers, and means of {DRAWS} calls are compared"
            result.tolerance = STANDARD_ERRORS * max(x.noise for x in (result.on_one_process(), *result.on_ranks()))
            return result
        if (dtype := self.on_one_process(Plan(record=True)).precision) == torch.float64:
            return None
        expected = self.on_one_process().tensors()
        noise = []
        for seed in range(REPETITIONS):
            scale = 1 + seed / 1000  # of the loss, so that the backward pass rounds differently too
            repeated = self.on_one_process(Plan(scale, rounding=(seed, dtype))).tensors()
            for name, x in repeated.items():
                x = x / scale if name.startswith(("encoder", "parameters", "sharded")) else x
                y = expected[name]
                noise += [float((x - y).abs().max() / max(1.0, float(y.abs().max())))] if x.numel() else []
        # where embeddings do not change, as normalised ones of one dimension, sums over ranks are still rounded differently
        bound = tolerance(noise, torch.finfo(torch.float64).eps, floor=SUM_ROUNDING * torch.finfo(dtype).eps)
        return Trial(self.case, self.batch, self.worlds, bound, f"computes in {str(dtype).removeprefix('torch.')}")

    @property
    def draws(self) -> bool:
        return self.on_one_process().drew_random_numbers

    def _run(self, size: int, steps: tuple[GlobalBatch, ...], plan: Plan) -> list[list[Outcome]]:
        """Run the steps of a training on ``size`` ranks, unless that was done before."""
        key = size, steps, plan
        if key not in self._results:
            timeout = max(self.worlds.timeout, AVERAGE_TIMEOUT) if self.case.repetitions else None
            self._results[key] = self.worlds.run(size, measure, self.case, steps, plan, timeout=timeout)
        return self._results[key]

    def on_ranks(self, plan: Plan = UNCHANGED) -> list[Measurement]:
        return [x for (x,) in self._run(self.world_size, (self.batch,), plan) if isinstance(x, Measurement)]

    def on_one_process(self, plan: Plan = UNCHANGED) -> Measurement:
        ((result,),) = self._run(1, (self.batch,), plan)
        assert isinstance(result, Measurement), "one step raises its errors"
        return result

    def no_reference(self, plan: Plan = UNCHANGED) -> str:
        """Return why one process gives nothing to compare with: it raises, or is not finite; empty if it does."""
        try:
            is_finite = self.on_one_process(plan).is_finite
        except RankError as error:
            return str(error)
        return "" if is_finite else f"Its value or a gradient is not finite at {self.batch}."

    def reduced(self, of: Literal["encoder", "parameters"], plan: Plan = UNCHANGED) -> Gradients:
        return self.reduce([getattr(result, of) for result in self.on_ranks(plan)])

    def reduce(self, by_rank: Sequence[Gradients]) -> Gradients:
        """Return the gradients after the gradient all-reduce of the trainer."""
        weight = 1 / len(by_rank) if self.case.grad_reduction == "mean" else 1.0
        return {name: weight * torch.stack([result[name] for result in by_rank]).sum(0) for name in by_rank[0]}

    @cached_property
    def training(self) -> tuple[GlobalBatch, ...]:
        steps = training_of(self.batch)
        outcomes = self._run(1, steps, UNCHANGED)[0]
        return tuple(x for x, y in zip(steps, outcomes, strict=True) if isinstance(y, Measurement) and y.is_finite)

    def train_on_ranks(self, plan: Plan = UNCHANGED) -> list[list[Outcome]]:
        return self._run(self.world_size, self.training, plan)

    def train_on_one_process(self, plan: Plan = UNCHANGED) -> list[Outcome]:
        return self._run(1, self.training, plan)[0]


def value_of(case: Case, samples: list[Tensor], d: int, worlds: Worlds) -> float:
    """Return the loss of these samples on one process; NaN if it raises."""
    with suppress(RankError):
        return worlds.run(1, lambda: float(Subject(case, d).value(samples).detach()))[0]
    return float("nan")
