"""DistributedLoss: the one gesture that makes any loss a function of the global batch."""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map, tree_unflatten

from contrastive_zoo.collectives import gather_together, packed, room_for
from contrastive_zoo.compiling import Function, uncompiled
from contrastive_zoo.losses.base import Loss
from contrastive_zoo.masks import labels_problem
from contrastive_zoo.meeting import Known, Luggage, agreeing, meet, refuse, refuse_empty
from contrastive_zoo.randomness import one_stream
from contrastive_zoo.world import Processes, Shards, World
from contrastive_zoo.wrapped import unwrapped_loss, unwrapped_miner

GradReduction = Literal["mean", "sum"]
Mode = Literal["replicated", "sharded"]

_MOST_LUGGAGE = 2**20
"""Bytes of rows that may come along with sizes; more would be copied once more than need be."""

FIRST_VALUES, EVERY_NTH_VALUE = 8, 64
"""Which of a foreign loss's values are compared between ranks: the first ones, and then now and again."""


_SELF = "DistributedLoss"
_FURTHER = ("indices_tuple", "ref_emb", "ref_labels")


class GlobalIndices(tuple[Tensor, ...]):
    """What a miner found among all ranks' rows, the same on every rank: made by ``DistributedMiner``.

    Example:
        >>> anchors, positives, negatives = GlobalIndices([torch.tensor([0]), torch.tensor([1]), torch.tensor([2])])
    """

    __slots__ = ()


class DistributedLoss(nn.Module):
    """``loss`` on the rows of all ranks: its value, its encoder gradient and its own parameters' gradient.

    For z₁ … z_N the rows of all ranks in rank order and L what one process computes from them, on every rank and for
    every split of the rows (uneven and empty shards too):

    - the returned value is L;
    - after the trainer's reduction the encoder's gradient is ∂L/∂θ;
    - the gradient of the loss's own parameters is ∂L/∂φ, the same on every rank already before any reduction.

    Losses of this library compute only their own anchors' part. Any other callable is computed on the gathered rows, by
    every rank alike; it may return a tensor, or a tuple, list or dict of such. On one process the same line works and
    changes nothing: a foreign loss gets its arguments as they are, and what it makes of NaN, of no rows or of arguments
    that it does not know is its own affair.

    Attributes and methods of the loss are read and set through this wrapper (``loss_fn.temperature``), but for private
    ones and those of the wrapper itself, such as ``loss`` and ``miner``. Keys of its state begin with ``loss.``.

    Args:
        loss: a loss of this library, or any module or function of tensors whose dimension 0 counts rows:
            ``loss(embeddings, labels)``, ``loss(view1, view2)``, or pytorch-metric-learning's
            ``loss(embeddings, labels, indices_tuple=None, ref_emb=None, ref_labels=None)``.
        miner: called as ``miner(embeddings, labels)`` (and with the reference rows, if there are any) on the gathered
            rows; what it returns is passed on as ``indices_tuple``.
        mode: how a foreign loss is computed: ``"replicated"``, by every rank on all rows, or ``"sharded"``, by each
            rank for its own anchors, which pytorch-metric-learning's losses of pairs and triplets allow.
        prefer_native: take this library's loss in place of a foreign one (and its miner) that it expresses exactly; where
            there is none, ``loss`` itself. It is called as the foreign one is. A call with ``indices_tuple`` or reference
            rows, which this library's losses do not take, is computed by the foreign one, with the weights learnt here.
        process_group: who holds rows: a process group, a 1-d DeviceMesh, or None for the default group at the time of
            the call.
        grad_reduction: what the trainer does with the ranks' gradients. ``"mean"``: DDP, FSDP, Lightning, Accelerate,
            the Hugging Face Trainer, DeepSpeed, :func:`contrastive_zoo.average_gradients`. ``"sum"``: a sum
            communication hook, a divide factor of 1.
        check_finite: whether rows with NaN or infinite values are refused.
        check_equal: whether what a foreign loss returns (its tensors) is compared between ranks, at the first calls and at
            every 64th; it travels with the next call's sizes, in no message of its own.
        static_shapes: whether each rank brings as many rows at every call. Ranks then tell each other sizes at the first
            call only. What is wrong with one rank's rows is from then on raised on that rank alone, and the others wait
            for it until the process group's time-out.
        ring: whether softmax losses pass columns from rank to rank, one shard at a time, rather than gather them all:
            memory does not grow with the number of ranks, and columns travel twice.

    Raises:
        ValueError: an unknown ``grad_reduction`` or ``mode``; a loss that cannot be called, is a class, or is distributed
            already, or holds a loss or miner that is (pytorch-metric-learning's own wrapper is taken off where it is
            outermost, and a DistributedMiner that is given as the miner); a miner for a loss that takes no
            ``indices_tuple``. At the call, if there are several ranks, on every rank alike: ranks that bring different
            arguments, widths, dtypes or ``grad_reduction``, arguments that the loss does not take, labels that are not one
            per row, views of one sample that are not as many, NaN or infinite rows, no rows at all, indices mined on one
            rank's rows only or given although there is a miner, or a last value that came out differently on some rank.

    Example:
        >>> import contrastive_zoo as cz
        >>> loss_fn = cz.DistributedLoss(cz.NTXent(temperature=1.0))
        >>> loss_fn(torch.eye(2), torch.eye(2))
        tensor(0.5514)
        >>> loss_fn = cz.DistributedLoss(lambda z, labels: z[labels == 0].square().sum())
        >>> loss_fn(torch.eye(2), torch.tensor([0, 1]))
        tensor(1.)
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        *,
        miner: Callable[..., Any] | None = None,
        mode: Mode = "replicated",
        prefer_native: bool = False,
        process_group: Processes = None,
        grad_reduction: GradReduction = "mean",
        check_finite: bool = True,
        check_equal: bool = True,
        static_shapes: bool = False,
        ring: bool = False,
    ) -> None:
        super().__init__()
        if grad_reduction not in ("mean", "sum"):
            raise ValueError(
                f"DistributedLoss: grad_reduction is 'mean' or 'sum', what the trainer does with gradients, got "
                f"{grad_reduction!r}. DDP, FSDP, Lightning, Accelerate and Hugging Face average: 'mean'."
            )
        if mode not in ("replicated", "sharded"):
            raise ValueError(f"DistributedLoss: mode is 'replicated' or 'sharded', got {mode!r}.")
        loss, miner = unwrapped_loss(_SELF, loss), unwrapped_miner(_SELF, miner, process_group=process_group)
        if not callable(loss):
            raise ValueError(f"DistributedLoss: a loss can be called, got {type(loss).__name__}, which cannot.")
        if isinstance(_bare(loss), DistributedLoss):
            raise ValueError("DistributedLoss: this loss is distributed already; wrap the bare one, once.")
        if (problem := _towers_problem(_bare(loss))) is not None:
            raise ValueError(f"DistributedLoss: {problem}")
        self._asked: Any = None  # the foreign loss and its miner in whose place this library's stands
        if prefer_native:
            loss, miner, self._asked = _native(loss, miner)
        if miner is not None and isinstance(_bare(loss), Loss):
            raise ValueError(
                f"DistributedLoss: {type(_bare(loss)).__name__} weighs all pairs itself and takes no miner's indices. "
                "Leave the miner out, or pass a loss that takes indices_tuple."
            )
        if miner is not None and not _takes(signature(_bare(loss)), "indices_tuple"):
            raise ValueError(
                f"DistributedLoss: {_name(_bare(loss))}{signature(_bare(loss))} takes no indices_tuple, which is how a "
                "miner's findings reach a loss. Leave the miner out."
            )
        if mode == "sharded" and not isinstance(_bare(loss), Loss):
            refusal = importlib.import_module("contrastive_zoo.adapters.pml_sharded").refusal(loss, miner)
            if refusal is not None:
                raise ValueError(f"DistributedLoss: {_name(_bare(loss))} cannot be computed in shards: {refusal}")
        self.miner = miner
        self.mode = mode
        self.process_group = process_group
        self.grad_reduction = grad_reduction
        self.check_finite = check_finite
        self.check_equal = check_equal
        self.ring = ring
        self._known: Known | None = {} if static_shapes else None
        self._few_rows = False  # those of the last step: every rank knows them
        self._room = 0
        self._calls = 0
        self._last: list[Tensor] = []
        self.loss = loss

    @uncompiled
    def forward(self, *rows: Any, **named_rows: Any) -> Any:
        """The loss of all ranks' rows, from mine.

        Args:
            rows: as the loss takes them.
            named_rows: as the loss takes them.
        """
        bare = _bare(self.loss)
        check_finite = self.check_finite and getattr(bare, "check_finite", True)
        world = World.of(self.process_group, check_finite=check_finite, ring=self.ring)
        loss, miner, room, settings = self.loss, self.miner, self._room, {}
        try:
            if self._asked is not None:
                asked = signature(self._asked.loss).bind(*rows, **named_rows).arguments
                native = self._asked.native_arguments(asked)
                # whether a rank falls back is compared, so that all compute the same function
                settings["arguments"] = ", ".join(name for name, x in asked.items() if x is not None)
                if native is None or (world.size == 1 and 0 in map(_count, native)):
                    loss, miner = self._asked.with_weights_of(bare), self._asked.miner
                    room = self._room if self._few_rows and bare.can_be_replicated({}) else 0  # as a native call has it
                else:
                    rows, named_rows = native, {}
            takes = signature(bare if loss is self.loss else self._asked.loss)
            # a miner's indices come later, also where the loss insists on them
            bound = (takes.bind if miner is None else takes.bind_partial)(*rows, **named_rows)
        except TypeError as error:
            if world.size == 1:
                return (self.loss if self._asked is None else self._asked.loss)(*rows, **named_rows)  # in its own words
            # this rank alone may have forgotten an argument; the others would wait for it
            refuse(_name(bare), f"{error}.", world=world)
        if getattr(bare, "sharded", False) and self.grad_reduction == "sum":
            bare.shard_gradient_scale = world.size  # no trainer adds up what each rank holds for itself
        with agreeing(self._known, grad_reduction=self.grad_reduction, mode=self.mode, **settings) as agreement:
            if not isinstance(bare, Loss) or loss is not self.loss:
                value = self._foreign(bound, world, loss, miner, room)
            elif world.size > 1 and self._few_rows and bare.can_be_replicated(bound.arguments):
                value = self._on_every_rank(bound, world)
            else:
                bound.arguments = _scaled(bound.arguments, world)
                value = self.loss(*bound.args, **bound.kwargs, world=world)
        self._few_rows = agreement.rows**2 * (agreement.width + _BESIDES) <= _LITTLE
        if self.grad_reduction == "sum" and world.size > 1:
            value = tree_map(lambda x: scale_gradient(x, 1 / world.size), value)
        return value

    def _on_every_rank(self, bound: inspect.BoundArguments, world: World) -> Any:
        """An own loss on all rows by every rank alike: one message or two, which few rows are sooner done with."""
        name = _name(_bare(self.loss))
        bound.arguments = self._gathered(Brought.meet(name, bound.arguments, world=world, room=self._room), world)
        return self.loss(*bound.args, **bound.kwargs, world=World(check_finite=False))

    def _foreign(self, bound: inspect.BoundArguments, world: World, loss: Any, miner: Any, room: int) -> Any:
        """A loss from elsewhere; on one process with its arguments as they are."""
        name, last = _name(_bare(self.loss)), self._last_value()
        problem = _indices_problem(bound.arguments, miner, world)
        if world.size == 1:
            if problem is not None:
                refuse(name, problem, world=world)
            return _computed(loss, miner, bound)
        problem = problem or unequal_problem(bound.arguments) or paired_problem(bound.arguments)
        brought = Brought.meet(name, bound.arguments, world=world, problem=problem, last_value=last, room=room)
        if self.mode == "sharded" and self._asked is None:
            sharded = importlib.import_module("contrastive_zoo.adapters.pml_sharded").sharded
            return sharded(loss, miner, _scaled(bound.arguments, world), brought.shards, world)
        # computed on all rows by every rank alike, so that each holds the complete gradient
        bound.arguments = self._gathered(brought, world)
        with one_stream(world, brought.device):
            value = _computed(loss, miner, bound)
        self._remember(value)
        return value

    def _gathered(self, brought: "Brought", world: World) -> dict[str, Any]:
        """Everybody's arguments; next time as many rows may come along with the sizes."""
        self._room = brought.room
        return brought.gathered(world)

    def _remember(self, value: Any) -> None:
        """Keep the value for the next meeting, if its turn has come."""
        if self.check_equal and (self._calls < FIRST_VALUES or self._calls % EVERY_NTH_VALUE == 0):
            # tensors alone: what is no tensor may be a rank's own, such as a time
            tensors = (x for x in tree_leaves(value) if isinstance(x, Tensor) and x.is_floating_point())
            self._last = [x.detach().sum() for x in tensors]
        self._calls += 1

    def _last_value(self) -> float | None:
        """One number that stands for all that was returned; read a step later, when no device has to be waited for."""
        last, self._last = self._last, []
        return sum(x.item() for x in last) if last else None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if (bare := self._has(name)) is None:
                raise
            return getattr(bare, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = name in vars(self) or name in vars(self).get("_modules", ()) or hasattr(type(self), name)
        bare = None if own else self._has(name)
        if bare is None:
            super().__setattr__(name, value)
        else:
            setattr(bare, name, value)

    def _has(self, name: str) -> Any:
        """The bare loss if this is one of its public attributes."""
        bare = _bare(vars(self).get("loss", vars(self).get("_modules", {}).get("loss")))
        return None if name.startswith("_") or not hasattr(bare, name) else bare


def _computed(loss: Any, miner: Any, bound: inspect.BoundArguments) -> Any:
    if miner is not None:
        bound.arguments["indices_tuple"] = miner(*mined(bound.arguments))
    return loss(*bound.args, **bound.kwargs)


def _indices_problem(arguments: Mapping[str, Any], miner: Any, world: World) -> str | None:
    indices = arguments.get("indices_tuple")
    if indices is not None and miner is not None:
        return "indices_tuple came along, but this DistributedLoss has a miner of its own. Leave one of them out."
    if world.size > 1 and isinstance(indices, (tuple, list)) and not isinstance(indices, GlobalIndices):
        return (
            "indices_tuple was mined on this rank's rows, but the loss sees all ranks' rows, where these indices mean "
            "other samples. Pass the miner instead: DistributedLoss(loss, miner=miner); or mine by "
            "DistributedMiner(miner), and pass on what it returns as it is."
        )
    return None


def _count(rows: Any) -> int | None:
    return len(rows) if isinstance(rows, Tensor) and rows.ndim else None


_LITTLE, _BESIDES = 2**28, 64
"""Multiplications that take no longer than the messages of ranks that share them; and as how many of these count a
similarity's exponential, sums and weights."""


class Brought(NamedTuple):
    """What this rank's arguments are made of, and how their rows lie over the ranks, which have met."""

    leaves: dict[str, Any]
    tree: Any
    shards: dict[str, Shards]
    luggage: Luggage | None = None

    @classmethod
    def meet(
        cls,
        name: str,
        arguments: Mapping[str, Any],
        *,
        world: World,
        problem: str | None = None,
        last_value: float | None = None,
        room: int = 0,
    ) -> "Brought":
        """Agree with all ranks on these arguments: tensors of rows, and all else the same everywhere.

        Raises:
            ValueError: on every rank alike, what :func:`contrastive_zoo.meeting.meet` finds; rows that are no tensors; no
                rows at all.
        """
        found, tree = tree_flatten_with_path(dict(arguments))
        leaves = {_path(path): leaf for path, leaf in found}
        rows = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor) and leaf.ndim > 0}
        settings = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, (int, float, str, type(None)))}
        settings |= {path: "global indices" for path, leaf in leaves.items() if isinstance(leaf, GlobalIndices)}
        for path, leaf in leaves.items():
            if isinstance(leaf, np.ndarray) or is_dataclass(leaf):
                problem = problem or (
                    f"{path} must be a tensor, or a tuple, list or dict of tensors, to be gathered, got a "
                    f"{type(leaf).__name__}. Pass tensors, such as torch.as_tensor({path})."
                )
        luggage = packed([_movable(x, world) for x in rows.values()], room) if room else None
        shards = meet(
            name, rows, world=world, problem=problem, settings=settings, last_value=last_value, luggage=luggage
        )
        if rows:
            refuse_empty(name, shards[0])
        return cls(leaves, tree, dict(zip(rows, shards, strict=True)), luggage)

    @property
    def room(self) -> int:
        """Bytes of the rank with the most rows, if they are so few that they may travel with the next card."""
        if not self.shards:
            return 0
        needed = room_for([self.leaves[path] for path in self.shards], list(self.shards.values()))
        return needed if needed <= _MOST_LUGGAGE else 0

    def gathered(self, world: World) -> dict[str, Any]:
        """The arguments with every tensor of rows replaced by all ranks' rows, whose gradients come out W times."""
        here = [_movable(self.leaves[path], world) for path in self.shards]
        found = gather_together(here, list(self.shards.values()), world, self.luggage, factor=world.size)
        everybody: dict[str, Tensor] = {}
        for path, all_ranks in zip(self.shards, found, strict=True):
            twin = next((x for x in everybody if self._are_one(x, path) and torch.equal(everybody[x], all_ranks)), None)
            everybody[path] = all_ranks.to(self.leaves[path].device) if twin is None else everybody[twin]
        leaves = self.leaves | everybody
        arguments: dict[str, Any] = tree_unflatten(list(leaves.values()), self.tree)
        return arguments

    def _are_one(self, path: str, other: str) -> bool:
        """Whether one tensor was given twice, which a loss may ask about; a rank without rows cannot tell."""
        x, y = self.leaves[path], self.leaves[other]
        return x is y or (len(x) == len(y) == 0 and x.dtype == y.dtype)

    @property
    def device(self) -> torch.device | None:
        """Where the rows lie."""
        return next((self.leaves[path].device for path in self.shards), None)


def _movable(rows: Tensor, world: World) -> Tensor:
    """Where messages are; labels may have been left on the CPU."""
    return rows if world.device.type == "cpu" else rows.to(world.device)


def mined(arguments: Mapping[str, Any]) -> list[Any]:
    """What a miner is called with: embeddings, labels, and the reference rows, if there are any.

    Example:
        >>> mined({"z": 1, "y": 2, "indices_tuple": None, "ref_emb": 3, "ref_labels": 4})
        [1, 2, 3, 4]
    """
    references = [arguments[name] for name in ("ref_emb", "ref_labels") if arguments.get(name) is not None]
    others = [x for name, x in arguments.items() if name not in _FURTHER]
    return others[:2] + references


def signature(loss: Any) -> inspect.Signature:
    """Of the loss; of some function of anything where Python does not know it, as for built-in ones.

    Example:
        >>> signature(lambda z, labels: z.sum())
        <Signature (z, labels)>
    """
    if isinstance(loss, Loss):
        return _signature_of(type(loss))  # type: ignore[arg-type]  # mypy takes a class for its instance
    try:
        return inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except ValueError:
        return inspect.signature(lambda *rows, **named_rows: None)


@functools.cache
def _signature_of(kind: type[Loss]) -> inspect.Signature:
    """Of an own loss, whose class says it all; Python takes longer to find out than a small loss to compute."""
    function = getattr(kind, "function", kind.forward)
    parameters = [x for x in inspect.signature(function).parameters.values() if x.name not in ("self", "world")]
    return inspect.Signature([x for x in parameters if x.kind is not x.KEYWORD_ONLY or function is kind.forward])


def _once(function: Callable[..., Any]) -> Callable[..., Any]:
    """One result for one object: a loss may ask whether two of its arguments are the same."""
    results: dict[int, tuple[Any, Any]] = {}

    def once(x: Any, *more: Any) -> Any:
        if id(x) not in results:
            results[id(x)] = x, function(x, *more)
        return results[id(x)][1]

    return once


def _takes(takes: inspect.Signature, name: str) -> bool:
    return name in takes.parameters or any(x.kind is x.VAR_KEYWORD for x in takes.parameters.values())


def unequal_problem(arguments: Mapping[str, Any]) -> str | None:
    """What is wrong with the number of labels of a loss or miner, in words; None if nothing is.

    Example:
        >>> unequal_problem({"embeddings": torch.eye(2), "labels": torch.tensor([0])})
        "labels are one per row, got 1 for 2 rows. Pass this rank's own labels with its own rows."
    """
    rows, labels = arguments.get("embeddings"), arguments.get("labels")
    if isinstance(rows, Tensor) and isinstance(labels, Tensor) and labels.ndim == 1 and len(labels) != len(rows):
        return labels_problem("labels", labels.long(), len(rows))
    return None


def paired_problem(arguments: Mapping[str, Any]) -> str | None:
    """What is wrong with this rank's arguments that belong together row by row, in words; None if nothing is.

    Totals over ranks may agree where one rank's rows do not: then every row that follows would be paired with another's.

    Example:
        >>> paired_problem({"ref_emb": torch.eye(3), "ref_labels": torch.tensor([0, 1])})
        "ref_labels are one per row of ref_emb, got 2 for 3 rows. Pass this rank's own ref_labels with its own ref_emb."
        >>> paired_problem({"queries": torch.eye(3), "keys": torch.eye(2)})   # two towers may differ
    """
    counts = {name: len(x) for name, x in arguments.items() if isinstance(x, Tensor) and x.ndim > 0}
    given = {name for name, x in arguments.items() if x is not None}
    pairs = [("ref_labels", "ref_emb", "are one per row of ref_emb")]
    if not given & {"labels", "indices_tuple", "ref_labels"}:
        pairs.append(("ref_emb", "embeddings", "holds another view of each row of embeddings"))
    first_view = next((name for name in arguments if name.startswith("view")), "")
    pairs += [
        (name, first_view, f"is another view of each row of {first_view}") for name in given if name[:4] == "view"
    ]
    pairs += [(name, "embeddings", "is one per row of embeddings") for name in given if name.endswith("mask")]
    for name, other, rule in sorted(pairs):
        if name in counts and other in counts and counts[name] != counts[other]:
            return (
                f"{name} {rule}, got {counts[name]} for {counts[other]} rows. Pass this rank's own {name} with its own "
                f"{other}."
            )
    return None


def _towers_problem(loss: Any) -> str | None:
    """What is wrong with a loss that holds its encoder, in words; None if it does not."""
    kinds = [kind for x in (loss.modules() if isinstance(loss, nn.Module) else ()) for kind in type(x).__mro__]
    if any(kind.__module__.startswith("sentence_transformers.") and kind.__name__ == "BaseModel" for kind in kinds):
        return (
            f"{_name(loss)} holds the encoder and takes its tokens, which must not travel; embeddings must. "
            "Use contrastive_zoo.adapters.sentence_transformers.DistributedSentenceLoss(loss)."
        )
    return None


def _native(loss: Any, miner: Any) -> tuple[Any, Any, Any]:
    """This library's loss in place of a foreign one with its miner, where it is the same function; and the two."""
    if isinstance(_bare(loss), Loss):
        return loss, miner, None
    # by name: the core does not know the adapters, and imports them only where they are asked for
    try:
        native, asked = importlib.import_module("contrastive_zoo.adapters.pml_native").asked(loss, miner)
    except ValueError:  # says why there is none
        return loss, miner, None
    return native, None, asked


def _bare(loss: Any) -> Any:
    """The loss itself where DDP is wrapped around it."""
    return loss.module if isinstance(loss, nn.parallel.DistributedDataParallel) else loss


def _name(loss: Any) -> str:
    return getattr(loss, "__name__", type(loss).__name__)


def _path(path: Any) -> str:
    """``['embeddings']`` as ``embeddings``, ``['views'][0]`` as ``views[0]``."""
    return keystr(path)[2:].replace("']", "", 1)


class _ScaleGradient(Function):
    """y = x;  dx = factor · dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy * ctx.factor, None


def scale_gradient(x: Any, factor: float) -> Any:
    """x itself, whose gradient comes out ``factor`` times as large; anything without a gradient as it is.

    Raises:
        ValueError: x is a dataclass, into which nobody looks for tensors.
    """
    if is_dataclass(x):
        raise ValueError(
            f"DistributedLoss: gradients cannot be scaled inside a {type(x).__name__}. Let the loss take and return "
            "tensors, or tuples, lists and dicts of them."
        )
    return _ScaleGradient.apply(x, factor) if isinstance(x, Tensor) and x.requires_grad and factor != 1 else x


def _scaled(arguments: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Rows whose gradients come out W times; a single number is a parameter, whose gradient every rank has whole."""
    if world.size == 1:
        return dict(arguments)
    scaled: dict[str, Any] = tree_map(
        _once(lambda x: scale_gradient(x, world.size) if isinstance(x, Tensor) and x.ndim > 0 else x), dict(arguments)
    )
    return scaled
