"""The base class of losses: fields are settings, ``inputs`` states a call, ``compute`` is the formula."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, Protocol, overload

from torch import Tensor, nn

from contrastive_zoo.engine.batch import Batch, Part, is_embedding
from contrastive_zoo.engine.cost import Blocks, Entry, Local, Pairs, Shared, Signs, Summed
from contrastive_zoo.engine.implementation import NO_KERNELS, Kernels, choose_kernels, implementation, is_dense
from contrastive_zoo.engine.plan import NO_NEEDS, Engine, Needs, Plan, planned
from contrastive_zoo.engine.tiling import USUAL_MATRICES
from contrastive_zoo.loss_base.settings import Settings
from contrastive_zoo.loss_base.shapes import arguments_problem, whole_arguments
from contrastive_zoo.loss_base.state import computed_again_problem
from contrastive_zoo.ranks import devices
from contrastive_zoo.ranks.compiling import uncompiled
from contrastive_zoo.ranks.devices import on_cpu
from contrastive_zoo.ranks.handshake import refuse_empty
from contrastive_zoo.ranks.one_process import is_gathered
from contrastive_zoo.ranks.row_checks import ValueRule, first_non_finite, logits_rule, values_problem
from contrastive_zoo.ranks.session import Session, agree
from contrastive_zoo.ranks.suggestions import warn_once
from contrastive_zoo.ranks.world import ONE_PROCESS, Shards, World

_SENDS_NO_EMBEDDINGS = "it sums statistics over ranks and gathers no candidates, so a ring would save nothing"

NO_RING: Mapping[Engine, str] = {
    "rows": "it compares each anchor with all candidates at once",
    "classes": _SENDS_NO_EMBEDDINGS,
    "statistics": _SENDS_NO_EMBEDDINGS,
    "slices": "it compares the projections of all samples at once",
    "other": "its compute() gathers what it needs",
}
"""Why candidates cannot pass from rank to rank, by the engine of a loss."""

P = ParamSpec("P")


@dataclass
class Inputs:
    """What a loss states of a call before anything is sent or computed."""

    # the tensors by name, whose dimension 0 counts samples; arguments that are None are left out
    rows: Mapping[str, Tensor]
    problem: str | None = None  # what is wrong with them on this rank, in words; None if nothing is
    values: Sequence[ValueRule] = ()  # what their values must be, such as classes; read after ``problem``
    # further values that must be equal on every rank, such as the shape of class weights
    compared: Mapping[str, object] = field(default_factory=dict)
    # whether only this rank can interpret them, as it can indices of its own samples: no rank can then compute all
    local: bool = False
    whole: bool = False  # whether every rank has to compute all of the loss, from the embeddings of all ranks
    parts: Sequence[Part] = ()  # the views of the members of a sum of losses
    host: Mapping[str, Any] = field(default_factory=dict)  # what the host has read of the tensors, for ``compute``

    @classmethod
    def of(cls, rows: Mapping[str, Tensor | None], problem: str | None = None, **more: Any) -> "Inputs":
        """Return the inputs of a call, some of whose arguments may be None."""
        return cls({name: x for name, x in rows.items() if x is not None}, problem, **more)

    def plus(self, rows: Mapping[str, Tensor | None], problem: str | None) -> "Inputs":
        """Return the inputs with further arguments, some of which may be None, and what is wrong with these."""
        present = {name: x for name, x in rows.items() if x is not None}
        return replace(self, rows={**self.rows, **present}, problem=self.problem or problem)


Known = dict[Callable[..., Inputs], Inputs]
"""Inputs of a call by the functions that returned them."""


@dataclass
class CallInputs:
    """What one rank states of a call of a loss."""

    name: str  # of the loss, the first word of its errors
    inputs: Inputs  # the tensors and what must be equal on every rank
    settings: SimpleNamespace = field(default_factory=SimpleNamespace)  # the values of its settings in this step
    # what must be equal on every rank, besides the tensors and the attributes of the loss
    compared: Mapping[str, object] = field(default_factory=dict)
    problem: str | None = None  # what is wrong with any of these on this rank, in words; None if nothing is
    kernels: Kernels = NO_KERNELS  # whether Triton kernels can compute the loss on this rank
    needs: Needs = NO_NEEDS  # of the plan
    whole: Collection[str] = ()  # tensors that are no embeddings of the trained model: prefixes take all their features

    @property
    def _first(self) -> Tensor:
        return next(x for x in self.inputs.rows.values() if is_embedding(x))

    @property
    def width(self) -> int:
        return self._first.shape[-1]

    @property
    def wide(self) -> int:
        """Return the bytes of an element of the first embeddings, in the precision of engines."""
        return max(4, self._first.dtype.itemsize)

    def learnt(self, *names: str) -> list[int]:
        """Return the bytes of those of these settings that are learnt."""
        values = (getattr(self.settings, name) for name in names)
        return [x.nbytes for x in values if isinstance(x, Tensor) and x.requires_grad]

    def features(self, *, partial: bool = False) -> Summed:
        """Return the message of a number for each feature."""
        return Summed(self.width * self.wide, partial)

    def products(self) -> list[Entry]:
        """Return what the sum of the products of all pairs of features takes."""
        first, numbers = next(iter(self.inputs.rows)), self.width**2
        return [Summed(numbers * self.wide), Local([first], 6 * numbers), Local(bytes=2 * numbers * self.wide)]

    def held(self, copies: float) -> Local:
        """Return the memory of so many copies of all embeddings."""
        names = [name for name, x in self.inputs.rows.items() if is_embedding(x)]
        return Local(names, bytes=copies * self.width * self.wide)

    def plan(self, shards: Sequence[Shards], ranks: int, **known: Any) -> Plan:
        """Return the path of the step, given the split of the tensors; warn once of what would make it quicker."""
        rows = self.inputs.rows
        tensors = tuple([(name, of, x.shape[1:], x.dtype) for (name, x), of in zip(rows.items(), shards, strict=False)])
        cpu = all(map(on_cpu, rows.values()))
        plan = planned(self.name, self.needs, tensors, world_size=ranks, on_cpu=cpu, plain=is_dense(), **known)
        for of in (plan, *plan.members):
            if of.warning is not None:
                warn_once(of.warning)
        return plan

    def batch(
        self,
        rows: Mapping[str, Tensor],
        shards: Sequence[Shards],
        world: World,
        plan: Plan,
        local_slice: slice | None = None,
    ) -> Batch:
        split, stated = dict(zip(rows, shards, strict=True)), self.inputs
        return Batch(rows, split, self.settings, world, plan, local_slice, stated.parts, stated.host, self.name)


class _Takes(Protocol[P]):
    """What has a method ``inputs`` of these arguments."""

    def inputs(self, *args: P.args, **named: P.kwargs) -> Inputs: ...


class Loss(Settings, nn.Module):
    """A loss: annotated class attributes are its settings, :meth:`inputs` states a call, :meth:`compute` is the formula.

    A subclass says nothing of ranks. :meth:`compute` runs once a call, on the batch that ranks have agreed on. If you
    override ``forward`` or add hooks, every rank computes the loss of all samples.

    In :meth:`compute`, write ``batch.shared(parameter)`` where a parameter meets local embeddings, and
    ``batch.shared_settings`` where settings do: then gradients are summed over ranks. In some calls ranks compare these
    gradients, and the loss of a few samples.

    A number as a setting is constant. A tensor or a module, such as :class:`LearnableTemperature`, is learnable or refused.

    For all losses: tensors of a call are this rank's. n may differ between ranks, and index i is the same sample in all
    tensors [n, …]. Formulas use the samples of all ranks. Examples import torch.

    Args:
        temperature: if the loss has it: t > 0, dimensionless unless a unit is named.
        normalize: if the loss has it: normalise embeddings to unit length first.
        reduction: if the loss has it: ``"mean"`` over all ranks' samples, anchors or pairs that count, 0 without any;
            ``"sum"``; ``"none"`` for the local samples, [n], or [views · n], view after view. Logarithms are in nats.
        check_finite: refuse NaN and infinite embeddings.

    Raises:
        TypeError: a setting that the loss does not have.
        ValueError: a setting out of its bounds. At the call, on every rank: wrong shapes, values or devices; embeddings that
            are not finite; widths, dtypes or settings that differ between ranks; no samples on any rank.

    Examples:
        >>> import torch
        >>> from contrastive_zoo.loss_base.settings import Positive
        >>> class MeanNorm(Loss):
        ...     scale: Positive = 1.0
        ...     def inputs(self, embeddings):
        ...         return Inputs.of({"embeddings": embeddings})
        ...     def compute(self, batch):
        ...         return batch.settings.scale * batch.reduce(batch.rows["embeddings"].norm(dim=1))
        >>> MeanNorm(scale=2.0)(torch.eye(3))
        tensor(2.)
    """

    check_finite: bool = True

    # what computes it; like ``has_kernel``, ``matrices`` and ``no_ring``, a keyword of the class
    engine: ClassVar[Engine] = "other"
    no_kernel: ClassVar[str | None] = "has no kernel for this loss"  # why no Triton kernel does; None if one may
    no_ring: ClassVar[str | None] = None  # why candidates cannot pass from rank to rank, if its engine does not say so
    # as large as the scores, of a block or of all embeddings, that it makes at once: ``explain`` counts them
    matrices: ClassVar[float] = USUAL_MATRICES
    # the names of the tensors that are compared, anchors and candidates; all embeddings with all if None
    compares: ClassVar[tuple[tuple[str, ...], tuple[str, ...]] | None] = None
    # the last dimensions of embeddings, as annotations name them; empty: that of the first embeddings
    embedding_dims: ClassVar[tuple[str, ...]] = ()
    row_indices: ClassVar[tuple[str, ...]] = ()  # arguments whose values are indices of this rank's samples

    def __init_subclass__(
        cls,
        *,
        engine: Engine | None = None,
        has_kernel: bool = False,
        matrices: float | None = None,
        no_ring: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init_subclass__(**kwargs)
        if engine is not None:
            cls.engine, cls.no_kernel = engine, None if has_kernel else Loss.no_kernel
        if matrices is not None:
            cls.matrices = matrices
        if no_ring is not None:
            cls.no_ring = no_ring

    def has_row_indices(self, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
        """Return whether a call brings :attr:`row_indices`, which only this rank can interpret."""
        parameters = inspect.signature(self.inputs).parameters if self.row_indices else {}
        by_name = {**dict(zip(parameters, args, strict=False)), **named}
        # an override may have renamed them
        return any(name not in parameters or by_name.get(name) is not None for name in self.row_indices)

    def inputs(self, *args: Any, **named: Any) -> Inputs:
        """Return what a call brings, of shapes that annotations such as ``Float[Tensor, "n d"]`` name, and what is wrong."""
        raise NotImplementedError(f"{type(self).__name__} must define inputs(), which returns Inputs of a call.")

    def compute(self, batch: Batch) -> Tensor:
        """Return the loss of a batch."""
        raise NotImplementedError(f"{type(self).__name__} must define compute(batch).")

    if TYPE_CHECKING:  # a call takes what inputs() takes, and the world

        @overload
        def __call__(self: "_Takes[P]", *args: P.args, **named: P.kwargs) -> Tensor: ...

        @overload
        def __call__(  # type: ignore[overload-cannot-match]  # mypy takes P for any arguments
            self, *args: Any, world: World, **named: Any
        ) -> Tensor: ...

        def __call__(self, *args: Any, **named: Any) -> Tensor: ...

    @uncompiled
    def forward(self, *args: Any, world: World | None = None, **named: Any) -> Tensor:
        """Return the loss; ``world`` are the ranks that share the batch, whose gradients are then plain derivatives."""
        if args and isinstance(args[0], Batch):
            return self.compute(args[0])
        session = Session.of(self.local((args, named)) if world is None else world, check_finite=self.check_finite)
        return self.compute(self.agreed(self.stated(args, named), session))

    def stated(self, args: Sequence[Any], named: Mapping[str, Any], known: Known | None = None) -> CallInputs:
        """Return what this rank states of a call; losses with one static :meth:`inputs` share it by ``known``."""
        name = type(self).__name__
        problem = arguments_problem(type(self), args, named) or self.settings_problem()
        if problem is None and (self._modules or self._parameters or self._buffers):
            problem = devices.values_problem(self) or computed_again_problem(self)
        if problem is not None:
            return CallInputs(name, Inputs({}), problem=problem)
        tensors = [x for x in (*args, *named.values()) if x is not None]
        one_device = all(map(on_cpu, tensors)) or len({x.device for x in tensors}) < 2  # the usual case
        if not one_device:
            args, named = devices.to_device_of_embeddings(args, named)
        settings, computed, problem = self.evaluated()
        if known is None or not self.has_static_inputs:
            inputs = self.inputs(*args, **named)
        else:
            inputs = known[self.inputs] = known.get(self.inputs) or self.inputs(*args, **named)
        problem = inputs.problem or problem or (None if one_device else devices.device_problem(inputs.rows))
        compared = {**computed, **inputs.compared}
        if problem is not None:
            return CallInputs(name, inputs, settings, compared, problem)
        if (rule := logits_rule(name, inputs.rows)) is not None:
            inputs = replace(inputs, values=[*inputs.values, rule])
        needs = self.needs(inputs)
        kernels = NO_KERNELS
        if needs.no_kernel != Loss.no_kernel and not (implementation() != "triton" and all(map(on_cpu, tensors))):
            kernels = choose_kernels(inputs.rows.values())
        kind: Any = type(self)  # mypy takes a class for its instance, which has no hash
        return CallInputs(name, inputs, settings, compared, problem, kernels, needs, whole_arguments(kind))

    def agreed(self, stated: CallInputs, session: Session, *, waits: bool = True) -> Batch:
        """Return the batch of a call without ``DistributedLoss``, after a handshake if there are several ranks."""
        name, rows = stated.name, stated.inputs.rows
        problem = stated.problem or values_problem(stated.inputs.values, session.findings.later, waits=waits)
        kernels = stated.kernels
        if session.size == 1:
            if problem is None and session.check_finite:
                problem = first_non_finite(rows)
            if problem is not None:
                raise ValueError(f"{name}: {problem}")
            shards = [Shards((x.shape[0],)) for x in rows.values()]
        else:
            unlike = (Tensor, list, World)  # a world says which of the ranks this is
            settings = {**vars(stated.settings), **stated.compared, "implementation": stated.kernels}
            compared = {key: x for key, x in settings.items() if not isinstance(x, unlike)}
            applies = stated.kernels.apply
            agreed = agree(name, rows, world=session, problem=problem, settings=compared, kernels=applies)
            shards, kernels = agreed.shards, kernels.on_ranks(agreed.kernels)
            needs = stated.needs._replace(split="gradients are plain derivatives by this rank's own embeddings")
            stated = replace(stated, needs=needs)
        refuse_empty(name, shards[0])
        plan = stated.plan(shards, session.size, kernels=kernels)
        return stated.batch(rows, shards, session, plan)

    @property
    def has_static_inputs(self) -> bool:
        """Whether :meth:`inputs` depends on the arguments alone, neither on settings nor on a state."""
        return not isinstance(self.inputs, MethodType)

    def needs(self, inputs: Inputs) -> Needs:
        """Return what a call asks of its plan. A loss whose tensors say more than its class extends this."""
        rows = inputs.rows
        if self.compares is not None:
            anchors, candidates = self.compares
        else:
            anchors = candidates = tuple([name for name, x in rows.items() if x.ndim > 1 and x.is_floating_point()])
        split = "only this rank knows what its indices mean" if inputs.local else self.split_reason()
        whole = "a loss in it has a forward of its own, or hooks" if inputs.whole else None
        is_one = self.has_one_operator(rows)
        return Needs(self.engine, anchors, candidates, whole, split, self.ring_problem(), self.no_kernel, is_one)

    def entries(self, stated: CallInputs) -> list[Entry]:
        """Return the engine entries that :meth:`compute` calls, for what a call costs: by default one of its engine."""
        needs, scale, entries = stated.needs, *self.scale_of(stated)
        candidates = () if needs.anchors == needs.candidates else needs.candidates
        if needs.engine == "softmax":
            entries.append(Pairs(needs.anchors, candidates, scale, self.__dict__.get("normalize", True)))
        elif needs.engine == "sigmoid":
            return [Signs(needs.anchors, candidates, self.is_reduced)]
        elif needs.engine == "rows":
            how = {"parameters": stated.learnt(*self._checks), "reduction": self.__dict__.get("reduction", "mean")}
            return [Blocks(needs.anchors, candidates, matrices=self.matrices, **how)]
        elif needs.engine == "statistics":
            entries.append(stated.held(1.6))
        return entries + self.reduced()

    @property
    def is_reduced(self) -> bool:
        return self.__dict__.get("reduction") != "none"

    def reduced(self) -> list[Entry]:
        """Return the message that adds up losses and counts."""
        return [Summed(2 * 8)] if self.is_reduced else []

    def scale_of(self, stated: CallInputs) -> tuple[float | None, list[Entry]]:
        """Return 1 / temperature, None if it is learnt, and the message of its gradient."""
        temperature = getattr(stated.settings, "temperature", None)
        if isinstance(temperature, Tensor):
            return None, [Shared(temperature.dtype.itemsize)]
        return (1.0 if temperature is None else 1 / temperature), []

    def has_one_operator(self, rows: Mapping[str, Tensor]) -> bool:
        """Return whether one operator computes a small batch of these tensors."""
        return False

    def split_reason(self) -> str | None:
        """Return why no rank can compute the loss of all ranks' embeddings, in words, or None."""
        return None if self.is_reduced else "reduction='none' returns losses of local samples"

    def ring_problem(self) -> str | None:
        """Return why candidates cannot pass from rank to rank instead of being gathered, in words, or None."""
        return self.no_ring or NO_RING.get(self.engine)

    def local(self, arguments: Any) -> World:
        """Return a world of this process alone; warn once if other processes run, whose embeddings were not gathered."""
        world = World.of()
        if world.size > 1 and not is_gathered(arguments):
            warn_once(
                f"{type(self).__name__} compares this process's own rows only, though {world.size} processes run: "
                f"its negatives are local. For the global batch write DistributedLoss({type(self).__name__}(...)).",
                key="local negatives",
            )
        return ONE_PROCESS
