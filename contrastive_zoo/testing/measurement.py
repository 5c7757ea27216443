"""The measurement of a loss on one rank's part of a global batch: value, gradients, buffers."""

import inspect
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from contrastive_zoo.small_batch import splitting
from contrastive_zoo.testing.batch import FEATURES, GlobalBatch
from contrastive_zoo.testing.messages import Messages

Call = Literal["labels", "views"]
GradReduction = Literal["mean", "sum"]
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A loss under test: how to make it, how to call it, what the trainer does.

    Args:
        make: a function without arguments that returns the loss, a callable of this rank's rows. Run on every rank, in
            its process group, with the same seed.
        call: ``"labels"`` for ``loss(embeddings, labels)``, ``"views"`` for ``loss(view1, view2)``.
        grad_reduction: what the trainer does with the ranks' gradients.
        views: how many views, for ``call="views"``.
        step: a whole training step is under test: ``make`` returns ``(model, step)``, and ``step(model, *rows)`` runs
            forward, backward and whatever reduces gradients, and returns the loss. Rows are then features [n, 3].
        name: what reports call it.
        shared: whether to force the general path, in which ranks split the work, for small batches too.
    """

    make: Callable[[], Any]
    call: Call = "labels"
    grad_reduction: GradReduction = "mean"
    views: int = 2
    step: bool = False
    name: str = "loss"
    shared: bool = True

    def __str__(self) -> str:
        return self.name


def call_form(loss: Any) -> Call:
    """How a loss is called, by the names of its parameters: with labels if one is called so, otherwise with views.

    Example:
        >>> call_form(lambda z, labels: z.sum()), call_form(lambda view1, view2: view1.sum())
        ('labels', 'views')
    """
    inner = getattr(loss, "loss", None) or getattr(loss, "module", None)
    if inner is not None and callable(inner) and type(loss).__name__.startswith("Distributed"):
        return call_form(inner)
    function = getattr(loss, "function", None) or (loss.forward if isinstance(loss, nn.Module) else loss)
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return "labels"
    return "labels" if any(name.lower() in ("labels", "label", "y", "target", "targets") for name in names) else "views"


@dataclass
class Measurement:
    """The measurement of one rank."""

    value: float
    encoder: Gradients
    """The encoder's gradient, as this rank's backward pass left it."""
    parameters: Gradients
    """The gradient of the loss's own parameters that every rank holds."""
    sharded: Gradients = field(default_factory=dict)
    """The gradient of this rank's part of the loss's sharded parameters."""
    state: Gradients = field(default_factory=dict)
    """The loss's buffers after the step."""
    collectives: frozenset[str] = frozenset()
    """Names of those called in the forward pass, as the dispatcher knows them, if the plan is recording."""
    draws: bool = False
    """Whether the loss has drawn random numbers."""


@dataclass(frozen=True)
class Plan:
    """Variations of a measurement: another scale, order of ranks or samples, a second batch, recorded collectives."""

    scale: float = 1.0
    shards: tuple[int, ...] | None = None
    rank_order: tuple[int, ...] | None = None
    shuffle_rows: bool = False
    then: int | None = None
    """Seed of a second batch whose backward pass runs after both forward passes; their mean is the loss."""
    recording: bool = False
    """Whether to record the names of collectives, which slows every operation down."""


AS_IS = Plan()


def measure(case: Case, batch: GlobalBatch, plan: Plan) -> Measurement:
    """On every rank: construct the loss, call it on the local rows, run backward, return what was measured."""
    with splitting(always=case.shared):
        return _measure(case, batch, plan)


def _measure(case: Case, batch: GlobalBatch, plan: Plan) -> Measurement:
    start()
    made = repeating_samples(case.make())
    batches = [batch] if plan.then is None else [batch, replace(batch, seed=plan.then)]
    if case.step:
        model, step = made
        return _measure_step(model, step, case, batches, plan)
    encoder = Encoder(batch.d)
    if isinstance(made, nn.Module):
        made = made.double()
    heard, streams = Messages(), random_streams()
    with heard if plan.recording else nullcontext():
        values = [scalar(made(*encoder.rows(local_rows(case, x, plan)))) for x in batches]
    for value in values:
        (plan.scale * value / len(values)).backward()
    mean = sum(float(value.detach()) for value in values) / len(values)
    module = made if isinstance(made, nn.Module) else nn.Module()
    of_encoder, of_loss = (gradients(x.named_parameters()) for x in (encoder, module))
    whole, parts = split_parameters(module, of_loss)
    return Measurement(mean, of_encoder, whole, parts, state(module), heard.moving, random_streams() != streams)


def repeating_samples(made: Any) -> Any:
    """A loss that no longer refuses embeddings that are equal on all ranks: drawn batches repeat samples on purpose."""
    if hasattr(made, "check_distinct"):
        made.check_distinct = False
    return made


def start() -> None:
    """Set float64 and the same seed, on every rank."""
    torch.set_default_dtype(torch.float64)
    if torch.accelerator.is_available():
        torch.manual_seed(0)
    else:  # torch.manual_seed writes down its caller's stack for a CUDA to come, which takes longer than a loss
        torch.default_generator.manual_seed(0)


def _measure_step(
    model: nn.Module, step: Callable[..., Any], case: Case, batches: list[GlobalBatch], plan: Plan
) -> Measurement:
    model = model.double()
    values = [float(step(model, *local_rows(case, x, plan))) for x in batches]
    return Measurement(sum(values) / len(values), gradients(model.named_parameters()), {}, state=state(model))


class Encoder(nn.Module):
    """A linear encoder whose rows do not depend on their neighbours to the last bit, unlike a matrix product's."""

    def __init__(self, d: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(FEATURES, d, dtype=torch.float64, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return sum((x[:, i : i + 1] * self.weight[i] for i in range(FEATURES)), torch.zeros(()))

    def rows(self, samples: Sequence[Tensor]) -> list[Tensor]:
        """What the loss is called with: embeddings of samples, labels as they are."""
        return [self(x) if x.is_floating_point() else x for x in samples]


def whole_batch(case: Case, batch: GlobalBatch) -> list[Tensor]:
    """All ranks' samples, before the encoder: one tensor a view, or samples and labels."""
    return batch.samples(case.views) if case.call == "views" else [*batch.samples(), batch.classes()]


def local_rows(case: Case, batch: GlobalBatch, plan: Plan) -> list[Tensor]:
    """This rank's part of the batch, before the encoder."""
    whole = whole_batch(case, batch)
    if plan.shuffle_rows:
        order = torch.randperm(batch.total, generator=torch.Generator().manual_seed(2))
        whole = [x[order] for x in whole]
    shards = plan.shards or batch.shards
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    shard = plan.rank_order[rank] if plan.rank_order else rank
    first = sum(shards[:shard])
    return [x[first : first + shards[shard]] for x in whole]


def scalar(value: Any) -> Tensor:
    """The loss in what a loss returned: itself, or the first entry of a tuple or dict."""
    while not isinstance(value, Tensor):
        value = next(iter(value.values() if isinstance(value, dict) else value))
    return value


def gradients(parameters: Iterable[tuple[str, Tensor]]) -> Gradients:
    """By name; a parameter that got none has a zero one."""
    learnt = {name: x for name, x in parameters if x.requires_grad}
    return {name: torch.zeros_like(x) if x.grad is None else x.grad.clone() for name, x in learnt.items()}


def split_parameters(module: nn.Module, found: Gradients) -> tuple[Gradients, Gradients]:
    """Those of parameters that every rank holds, and of those of which each rank holds its part.

    A module whose parameters are sharded says so by an attribute ``sharded``.
    """
    names = {
        f"{prefix}{'.' * bool(prefix)}{name}"
        for prefix, part in module.named_modules()
        if getattr(part, "sharded", False) is True and not hasattr(part, "grad_reduction")
        for name, _ in part.named_parameters(recurse=False)
    }
    return {k: x for k, x in found.items() if k not in names}, {k: x for k, x in found.items() if k in names}


def random_streams() -> tuple[Any, ...]:
    """Where torch's, NumPy's and Python's global generators stand."""
    of_numpy: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), of_numpy[1].tobytes(), of_numpy[2], random.getstate()


def state(module: nn.Module) -> Gradients:
    """Its buffers."""
    return {name: x.detach().clone() for name, x in module.named_buffers()}
