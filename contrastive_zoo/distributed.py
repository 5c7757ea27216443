"""DistributedLoss: the one gesture that makes any loss a function of the global batch."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Generic, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import TypeVar

from contrastive_zoo.arguments import Arguments, GlobalIndices
from contrastive_zoo.collectives import broadcast, scale_gradient
from contrastive_zoo.compiling import uncompiled
from contrastive_zoo.engine.dense_mode import is_dense
from contrastive_zoo.handshake import Statement, kind, refuse_empty
from contrastive_zoo.later import read_later
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_summary import StateSums, described, runs_foreign_code, shared_state
from contrastive_zoo.masks import labels_problem
from contrastive_zoo.randomness import StateWatch, one_stream
from contrastive_zoo.session import (
    Opening,
    Options,
    Replicate,
    Session,
    first_non_finite,
    is_small,
    meet,
    refuse,
    tolerance,
)
from contrastive_zoo.world import Processes, Shards, World
from contrastive_zoo.wrapped import unwrapped_loss, unwrapped_miner

GradReduction = Literal["mean", "sum"]
Mode = Literal["replicated", "sharded"]
R = TypeVar("R", default=Any)
"""What the loss returns."""

FIRST_VALUES, EVERY_NTH_CALL = 8, 64
"""Which calls' values and parameters are compared between ranks: values of the first ones, then both now and again."""

_FURTHER = ("indices_tuple", "ref_emb", "ref_labels")


class DistributedLoss(nn.Module, Generic[R]):
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
        check_equal: whether ranks compare the loss's parameters and buffers at the first call and at every 64th, and what
            a loss that every rank computes returns at the first calls and at every 64th. It costs no message of its own.
        check_distinct: whether the first call refuses embeddings that are the same on every rank, as they are where
            somebody has gathered them before.
        broadcast_parameters: whether the loss's parameters and buffers become rank 0's at the first call between ranks,
            as DDP does with a model's when it is constructed.
        static_shapes: whether each rank brings as many rows at every call; another number is refused on every rank.
        ring: whether softmax losses pass columns from rank to rank, one shard at a time, rather than gather them all:
            memory does not grow with the number of ranks, and columns travel twice.

    Raises:
        ValueError: an unknown ``grad_reduction`` or ``mode``; a loss that cannot be called, is a class, or is distributed
            already, or holds a loss or miner that is (pytorch-metric-learning's own wrapper is taken off where it is
            outermost, and a DistributedMiner that is given as the miner); a miner for a loss that takes no
            ``indices_tuple``; ``ring`` for a loss that gathers all candidates. At the call, if there are several ranks, on
            every rank alike: ranks that differ in the class of the loss, in any of its settings, in this wrapper's options,
            in their arguments, widths, dtypes or parameters; arguments that the loss does not take, labels that are not one
            per row, NaN or infinite rows, no rows at all, the same rows on every rank, indices mined on one rank's rows
            only or given although there is a miner, or a last value that came out differently on some rank.

    Example:
        >>> import contrastive_zoo as cz
        >>> loss_fn = cz.DistributedLoss(cz.NTXent(temperature=1.0))
        >>> loss_fn(torch.eye(2), torch.eye(2))
        tensor(0.5514)
        >>> loss_fn = cz.DistributedLoss(lambda z, labels: z[labels == 0].square().sum())
        >>> loss_fn(torch.eye(2), torch.tensor([0, 1]))
        tensor(1.)
    """

    __call__: Callable[..., R]

    def __init__(
        self,
        loss: Callable[..., R],
        *,
        miner: Callable[..., Any] | None = None,
        mode: Mode = "replicated",
        prefer_native: bool = False,
        process_group: Processes = None,
        grad_reduction: GradReduction = "mean",
        check_finite: bool = True,
        check_equal: bool = True,
        check_distinct: bool = True,
        broadcast_parameters: bool = False,
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
        loss = unwrapped_loss("DistributedLoss", loss)
        miner = unwrapped_miner("DistributedLoss", miner, process_group=process_group)
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
        if ring and not (isinstance(_bare(loss), Loss) and _bare(loss).can_ring()):
            raise ValueError(
                f"DistributedLoss: ring=True is for losses whose candidates can pass from rank to rank (InfoNCE, Clip, "
                f"NTXent, SupCon, MNRL, MILNCE, AlignUniform), got {_name(_bare(loss))}, which gathers them all. Leave "
                "ring out."
            )
        if mode == "sharded" and not isinstance(_bare(loss), Loss):
            from contrastive_zoo.adapters.pml_sharded import refusal

            if (reason := refusal(loss, miner)) is not None:  # type: ignore[arg-type]  # a function is refused
                raise ValueError(f"DistributedLoss: {_name(_bare(loss))} cannot be computed in shards: {reason}")
        self.miner = miner
        self.mode = mode
        self.prefer_native = prefer_native
        self.process_group = process_group
        self.grad_reduction = grad_reduction
        self.check_finite = check_finite
        self.check_equal = check_equal
        self.check_distinct = check_distinct
        self.broadcast_parameters = broadcast_parameters
        self.static_shapes = static_shapes
        self.ring = ring
        self._sizes: list[int] | None = None
        self._draws = False
        self._keeps_state = False
        self._in_step = False
        self._calls = 0
        self._last: Callable[[], list[float]] | None = None
        self._sums: Callable[[], StateSums] | None = None
        self._finite: dict[str, Callable[[], list[float]]] = {}
        self.loss = loss

    @uncompiled
    def forward(self, *rows: Any, **named_rows: Any) -> Any:
        """The loss of all ranks' rows, from this rank's.

        Args:
            rows: as the loss takes them.
            named_rows: as the loss takes them.
        """
        bare = _bare(self.loss)
        session = self._session(bare)
        try:
            call = self._call(rows, named_rows, session)
        except TypeError as error:
            if session.size == 1:
                return (self.loss if self._asked is None else self._asked.loss)(*rows, **named_rows)  # its own error
            # this rank alone may have forgotten an argument; the others would wait for it
            refuse(_name(bare), f"{error}.", world=session)
        if session.size == 1:
            return self._alone(call, session)
        if self.broadcast_parameters and not self._in_step:
            self._start_from_rank_0(session)
        arguments = Arguments.of(call.bound.arguments)
        if arguments.on_accelerator:  # looked for a step later
            session = replace(session, options=replace(session.options, check_finite=False))
        session.progress.opening = Opening(self._statement(call, arguments, session))
        before = _buffer_versions(bare)
        value = self._computed(call, arguments, session)
        self._keeps_state = _buffer_versions(bare) != before
        self._calls += 1
        if self.grad_reduction == "sum":
            value = tree_map(lambda x: scale_gradient(x, 1 / session.size), value)
        return value

    def _call(self, rows: tuple[Any, ...], named_rows: dict[str, Any], session: Session) -> "_Call":
        """These arguments as the loss takes them, or the one in whose place it stands where only that one takes them."""
        bare, present = _bare(self.loss), {}
        if self._asked is not None:
            asked = signature(self._asked.loss).bind(*rows, **named_rows)
            native = self._asked.native_arguments(asked.arguments)
            # whether a rank falls back is compared, so that all compute the same function
            present["arguments"] = ", ".join(name for name, x in asked.arguments.items() if x is not None)
            if native is None or (session.size == 1 and 0 in map(_count, native)):
                return _Call(self._asked.with_weights_of(bare), self._asked.miner, asked, present)
            rows, named_rows = native, {}
        # a miner's indices come later, also where the loss insists on them
        takes = signature(bare)
        bound = (takes.bind if self.miner is None else takes.bind_partial)(*rows, **named_rows)
        return _Call(self.loss, self.miner, bound, present)

    def _session(self, bare: Any) -> Session:
        world = World.of(self.process_group)
        # parameters that each rank holds for itself are added up by no trainer
        factor = world.size if self.grad_reduction == "sum" else 1
        check_finite = self.check_finite and getattr(bare, "check_finite", True)
        return Session(world.rank, world.size, world.group, Options(check_finite, self.ring, factor))

    def _alone(self, call: "_Call", session: Session) -> Any:
        """One process: a loss of this library as it is anywhere, any other with its arguments as they are."""
        if call.own:
            return call.loss(*call.bound.args, **call.bound.kwargs, world=session)
        if (problem := _indices_problem(call.bound.arguments, call.miner, session)) is not None:
            refuse(_name(_bare(self.loss)), problem, world=session)
        return call.mined()

    def _statement(self, call: "_Call", arguments: Arguments, session: Session) -> Statement:
        """What this rank brings to the step's first handshake, besides what a loss of this library declares."""
        bare, bound = _bare(self.loss), call.bound
        replicable = bare.can_be_replicated(*bound.args, **bound.kwargs) if call.own else not self._is_sharded
        problem = self._finite_problem(arguments) or arguments.problem
        if (
            self._keeps_state and _in_backward()
        ):  # said in the handshake: a wrapper made again on one rank does not know it
            problem = problem or _COMPUTED_AGAIN
        if not call.own:
            problem = problem or _indices_problem(bound.arguments, call.miner, session)
            problem = problem or unequal_problem(bound.arguments) or paired_problem(bound.arguments)
            if problem is None and session.options.check_finite:
                problem = first_non_finite(arguments.rows)
        if self.static_shapes:
            problem = problem or self._shapes_problem(arguments)
        statement = Statement(
            _name(bare),
            {**described(bare, third_party=self.check_equal), **self._options(), **call.present, **arguments.compared},
            arguments.sizes,
            problem,
            last_value=self._last_value(),
            same=arguments.same,
            tolerance=tolerance(arguments.rows.values()),
            replicable=replicable and not (call.own and is_dense()),
            draws=self._draws,
            small=(lambda shards: self._is_small(arguments, shards)) if call.own else (lambda shards: True),
            payload=arguments.payload(session) if replicable else None,
        )
        if (sums := self._state_sums(bare)) is not None:
            statement.norm, statement.projection, statement.parameters = sums.norm, sums.projection, sums.by_name
        if self.check_distinct and self._calls == 0:
            statement.fingerprint = arguments.fingerprint
        return statement

    @property
    def _is_sharded(self) -> bool:
        return self.mode == "sharded" and self._asked is None

    def _options(self) -> dict[str, str]:
        """This wrapper's settings, as ranks compare them."""
        names = ("grad_reduction", "mode", "ring", "static_shapes", "training")
        modes = {"dense()": is_dense(), "torch.is_grad_enabled()": torch.is_grad_enabled()}
        of_miner = {} if self.miner is None else described(self.miner, third_party=self.check_equal)
        return {
            **{name: str(getattr(self, name)) for name in names},
            **{name: str(value) for name, value in modes.items()},
            **{"the miner" if name == "the loss" else f"miner.{name}": value for name, value in of_miner.items()},
        }

    def _shapes_problem(self, arguments: Arguments) -> str | None:
        if self._sizes is None:
            self._sizes = arguments.sizes
        if arguments.sizes == self._sizes:
            return None
        return (
            f"static_shapes=True, but this rank brought {arguments.sizes} rows of {', '.join(arguments.rows)} after "
            f"{self._sizes}. Drop the last incomplete batch, or leave static_shapes out."
        )

    @staticmethod
    def _is_small(arguments: Arguments, shards: Sequence[Shards]) -> bool:
        return is_small(arguments.total(shards), arguments.width)

    def _computed(self, call: "_Call", arguments: Arguments, session: Session) -> Any:
        """The loss, each rank's part of it or all of it on every rank, as the handshake decides."""
        bare, name, opening = _bare(self.loss), _name(_bare(self.loss)), session.progress.opening
        assert opening is not None
        watch = None
        try:
            if call.own:
                if runs_foreign_code(bare):
                    watch = StateWatch(bare, arguments.device)
                    session.progress.changes = watch.has_changed
                session.declare(name, [partial(call.loss, *call.bound.args, **call.bound.kwargs, world=session)])
                if watch is not None and watch.has_changed():  # before it declared anything
                    watch.undo()
                scaled = inspect.BoundArguments(call.bound.signature, _scaled(call.bound.arguments, session))
                return call.loss(*scaled.args, **scaled.kwargs, world=session)
            session.open(name)
            assert opening.agreed is not None
            shards = dict(zip(arguments.rows, opening.agreed.shards, strict=True))
            if shards:
                refuse_empty(name, next(iter(shards.values())))
            from contrastive_zoo.adapters.pml_sharded import sharded

            return sharded(call.loss, call.miner, _scaled(call.bound.arguments, session), shards, session)
        except Replicate:
            if watch is not None and watch.has_changed():
                self._draws = True
                watch.undo()
        except Exception as error:
            if not session.opened:  # the other ranks wait in the handshake
                refuse(name, f"{type(error).__name__}: {error}", world=session)
            raise
        return self._replicated(call, arguments, session, opening)

    def _replicated(self, call: "_Call", arguments: Arguments, session: Session, opening: Opening) -> Any:
        """The loss on the rows of all ranks, computed by every rank alike, so that each holds the complete gradient."""
        assert opening.agreed is not None
        bare = _bare(self.loss)
        if opening.agreed.shards:
            refuse_empty(_name(bare), opening.agreed.shards[0])
        bound = call.bound
        bound.arguments = arguments.gathered(opening.agreed, session)
        draws = not call.own or runs_foreign_code(bare)
        with one_stream(session, arguments.device) if draws else nullcontext():
            if call.own:
                value = call.loss(*bound.args, **bound.kwargs, world=Session.of(World(), check_finite=False))
            else:
                value = call.mined()
        self._remember(value)
        return value

    def _start_from_rank_0(self, session: Session) -> None:
        """Rank 0's parameters and buffers on every rank: ranks that were seeded differently drew different ones."""
        state = dict(shared_state(_bare(self.loss)))
        kinds = {name: kind(x) for name, x in state.items()}
        meet(_name(_bare(self.loss)), {}, world=session, settings={"broadcast_parameters": "now", **kinds})
        for x in state.values():
            x.data.copy_(broadcast(x.detach(), process_group=session))
        self._in_step = True

    def _remember(self, value: Any) -> None:
        """Keep the value for the next handshake, if its turn has come."""
        if self.check_equal and (self._calls < FIRST_VALUES or self._calls % EVERY_NTH_CALL == 0):
            # tensors alone: anything else may be a rank's own, such as a time
            tensors = [x for x in tree_leaves(value) if isinstance(x, Tensor) and x.is_floating_point()]
            self._last = read_later(torch.stack([x.detach().sum().double() for x in tensors])) if tensors else None

    def _last_value(self) -> float | None:
        """One number that stands for all that was returned a step before."""
        last, self._last = self._last, None
        return None if last is None else sum(last())

    def _state_sums(self, loss: Any) -> StateSums | None:
        """Of the loss's parameters and buffers, if their turn has come; of an accelerator's a step later."""
        due, self._sums = self._sums, None
        if self.check_equal and self._calls % EVERY_NTH_CALL == 0:
            self._sums = StateSums.of(loss)
            if due is None and all(x.device.type == "cpu" for _, x in shared_state(loss)):
                due, self._sums = self._sums, None
        return None if due is None else due()

    def _finite_problem(self, arguments: Arguments) -> str | None:
        """Which rows of an accelerator held NaN or infinite values a step before; and begin to look at these."""
        seen, self._finite = self._finite, {}
        if self.check_finite and arguments.on_accelerator:
            floating = {name: x for name, x in arguments.rows.items() if x.is_floating_point()}
            self._finite = {name: read_later(x.detach().isfinite().all()) for name, x in floating.items()}
        bad = [name for name, finite in seen.items() if not all(finite())]
        return (
            None
            if not bad
            else (
                f"{', '.join(bad)} held NaN or infinite values at the previous call (on accelerators they are looked for "
                "without waiting). Look for a diverged encoder, a division by a zero norm or an overflow in half precision; "
                "check_finite=False lets them through."
            )
        )

    def __getstate__(self) -> dict[str, Any]:
        """Without what the next handshake of this object would have read off a device."""
        return {**self.__dict__, "_last": None, "_sums": None, "_finite": {}}

    def extra_repr(self) -> str:
        """Every option that is not its default; modules stand below."""
        shown = []
        for name, parameter in inspect.signature(type(self).__init__).parameters.items():
            value = None if name == "self" else getattr(self, name)
            if value is not parameter.default and value != parameter.default and name not in {"self", *self._modules}:
                shown.append(f"{name}={_shown(value)}")
        return ", ".join(shown)

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


class _Call(NamedTuple):
    """One call: the loss that computes it, its miner, their arguments, and which of them are present."""

    loss: Any
    miner: Any
    bound: inspect.BoundArguments
    present: dict[str, str]

    @property
    def own(self) -> bool:
        """Whether a loss of this library computes it."""
        return isinstance(_bare(self.loss), Loss)

    def mined(self) -> Any:
        """What a third-party loss returns, given what the miner finds among its rows."""
        if self.miner is not None:
            self.bound.arguments["indices_tuple"] = self.miner(*mined(self.bound.arguments))
        return self.loss(*self.bound.args, **self.bound.kwargs)


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


_COMPUTED_AGAIN = (
    "a backward pass computes the loss again, as torch.utils.checkpoint does, but its state has moved on since (a memory, a "
    "centre, a running statistic). Put the encoder under the checkpoint and leave the loss out."
)


def _buffer_versions(loss: Any) -> list[int]:
    """Numbers that grow with every change of a buffer."""
    return [x._version for x in loss.buffers()] if isinstance(loss, nn.Module) else []


def _in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread, within which a checkpoint computes its forward again."""
    return torch._C._current_graph_task_id() != -1


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
    # here: the library that it adapts is installed only where somebody uses it
    from contrastive_zoo.adapters.pml_native import native_and_original

    try:
        native, foreign = native_and_original(loss, miner)
    except ValueError:  # says why there is none
        return loss, miner, None
    return native, None, foreign


def _bare(loss: Any) -> Any:
    """The loss itself where DDP is wrapped around it."""
    return loss.module if isinstance(loss, nn.parallel.DistributedDataParallel) else loss


def _name(loss: Any) -> str:
    return getattr(loss, "__name__", type(loss).__name__)


def _shown(option: Any) -> str:
    """An option in a repr: a function by its name, a process group by its ranks, which are all one wants to know."""
    if isinstance(option, torch.distributed.ProcessGroup):
        return f"<ranks {torch.distributed.get_process_group_ranks(option)}>"
    return _name(option) if callable(option) else repr(option)


def _scaled(arguments: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Rows whose gradients come out W times; a single number is a parameter, whose gradient every rank has whole."""
    if world.size == 1:
        return dict(arguments)
    scaled: dict[str, Any] = tree_map(
        _once(lambda x: scale_gradient(x, world.size) if isinstance(x, Tensor) and x.ndim > 0 else x), dict(arguments)
    )
    return scaled
