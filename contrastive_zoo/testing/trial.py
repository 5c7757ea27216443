"""What a loss does to a global batch, measured on one process and on W: values, gradients, state."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from contrastive_zoo.testing.batch import FEATURES, GlobalBatch
from contrastive_zoo.testing.worlds import RankError, Worlds

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
    """

    make: Callable[[], Any]
    call: Call = "labels"
    grad_reduction: GradReduction = "mean"
    views: int = 2
    step: bool = False
    name: str = "loss"

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
    """What one rank found."""

    value: float
    encoder: Gradients
    """The encoder's gradient, as this rank's backward pass left it."""
    parameters: Gradients
    """The loss's own."""
    state: Gradients = field(default_factory=dict)
    """The loss's buffers after the step."""
    collectives: frozenset[str] = frozenset()
    """Names of those called in the forward pass, as the dispatcher knows them, if the plan is listening."""


@dataclass(frozen=True)
class Plan:
    """How a batch is fed: scaled, in another order of ranks or rows, followed by a second one; what is heard of it."""

    scale: float = 1.0
    shards: tuple[int, ...] | None = None
    rank_order: tuple[int, ...] | None = None
    shuffle_rows: bool = False
    then: int | None = None
    """Seed of a second batch whose backward pass runs after both forward passes; their mean is the loss."""
    listening: bool = False
    """Whether the names of collectives are wanted, which slows every operation down."""


AS_IS = Plan()


class Trial:
    """One loss on one global batch. Laws ask it for measurements; each is made once.

    Args:
        case: the loss.
        batch: the rows.
        worlds: where to run.
    """

    def __init__(self, case: Case, batch: GlobalBatch, worlds: Worlds) -> None:
        self.case, self.batch, self.worlds = case, batch, worlds
        self.together = lru_cache(maxsize=None)(self._together)
        self.alone = lru_cache(maxsize=None)(self._alone)

    @cached_property
    def world_size(self) -> int:
        """W."""
        return len(self.batch.shards)

    def _together(self, plan: Plan = AS_IS) -> list[Measurement]:
        """By rank, on W processes.

        Raises:
            RankError: a rank raised, died or never answered.
        """
        return self.worlds.run(len(plan.shards or self.batch.shards), measure, self.case, self.batch, plan)

    def _alone(self, plan: Plan = AS_IS) -> Measurement:
        """On one process, which holds all rows.

        Raises:
            RankError: it raised.
        """
        whole = Plan(plan.scale, (self.batch.total,), None, plan.shuffle_rows, plan.then)
        return self.worlds.run(1, measure, self.case, self.batch, whole)[0]

    def reduced(self, what: Literal["encoder", "parameters"], plan: Plan = AS_IS) -> Gradients:
        """Gradients after the trainer's reduction over ranks."""
        by_rank = [getattr(found, what) for found in self.together(plan)]
        if self.case.step:  # the step has reduced them
            return by_rank[0]
        weight = 1 / len(by_rank) if self.case.grad_reduction == "mean" else 1.0
        return {name: weight * sum(found[name] for found in by_rank) for name in by_rank[0]}


def measure(case: Case, batch: GlobalBatch, plan: Plan) -> Measurement:
    """Run on every rank: make the loss, feed it this rank's rows, go backward, look."""
    _start()
    made = case.make()
    batches = [batch] if plan.then is None else [batch, replace(batch, seed=plan.then)]
    if case.step:
        model, step = made
        return _measure_step(model, step, case, batches, plan)
    encoder = Encoder(batch.d)
    if isinstance(made, nn.Module):
        made = made.double()
    heard = _Listener()
    with heard if plan.listening else nullcontext():
        values = [_scalar(made(*encoder.rows(my_rows(case, x, plan)))) for x in batches]
    for value in values:
        (plan.scale * value / len(values)).backward()
    mean = sum(float(value.detach()) for value in values) / len(values)
    module = made if isinstance(made, nn.Module) else nn.Module()
    of_encoder, of_loss = (_gradients(x.named_parameters()) for x in (encoder, module))
    return Measurement(mean, of_encoder, of_loss, _state(module), frozenset(heard.names))


def _start() -> None:
    torch.set_default_dtype(torch.float64)
    if torch.accelerator.is_available():
        torch.manual_seed(0)
    else:  # torch.manual_seed writes down its caller's stack for a CUDA to come, which takes longer than a loss
        torch.default_generator.manual_seed(0)


def _measure_step(
    model: nn.Module, step: Callable[..., Any], case: Case, batches: list[GlobalBatch], plan: Plan
) -> Measurement:
    model = model.double()
    values = [float(step(model, *my_rows(case, x, plan))) for x in batches]
    return Measurement(sum(values) / len(values), _gradients(model.named_parameters()), {}, _state(model))


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


def value_of(case: Case, samples: list[Tensor], d: int, worlds: Worlds) -> float:
    """What one process computes from these samples; NaN if it cannot."""
    try:
        return worlds.run(1, _value, case, samples, d)[0]
    except RankError:
        return float("nan")


def _value(case: Case, samples: list[Tensor], d: int) -> float:
    _start()
    made = case.make()
    if isinstance(made, nn.Module):
        made = made.double()
    return float(_scalar(made(*Encoder(d).rows(samples))).detach())


def my_rows(case: Case, batch: GlobalBatch, plan: Plan) -> list[Tensor]:
    """This rank's part of the batch, before the encoder."""
    whole = whole_batch(case, batch)
    if plan.shuffle_rows:
        order = torch.randperm(batch.total, generator=torch.Generator().manual_seed(2))
        whole = [x[order] for x in whole]
    shards = plan.shards or batch.shards
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    mine = plan.rank_order[rank] if plan.rank_order else rank
    start = sum(shards[:mine])
    return [x[start : start + shards[mine]] for x in whole]


class _Listener(TorchDispatchMode):
    """Hears which collectives move rows or statistics, whoever calls them under whatever name; int64 counts do not."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            moved = [x for x in tree_leaves(args) if isinstance(x, Tensor) and x.dtype != torch.int64]
            self.names |= {func._opname} if moved else set()
        return func(*args, **(kwargs or {}))


def _scalar(value: Any) -> Tensor:
    """The loss in what a loss returned: itself, or the first entry of a tuple or dict."""
    while not isinstance(value, Tensor):
        value = next(iter(value.values() if isinstance(value, dict) else value))
    return value


def _gradients(parameters: Iterable[tuple[str, Tensor]]) -> Gradients:
    """By name; a parameter that got none has a zero one."""
    learnt = {name: x for name, x in parameters if x.requires_grad}
    return {name: torch.zeros_like(x) if x.grad is None else x.grad.clone() for name, x in learnt.items()}


def _state(module: nn.Module) -> Gradients:
    return {name: x.detach().clone() for name, x in module.named_buffers()}


__all__ = [
    "AS_IS",
    "Case",
    "Encoder",
    "Measurement",
    "Plan",
    "RankError",
    "Trial",
    "call_form",
    "measure",
    "value_of",
    "whole_batch",
]
