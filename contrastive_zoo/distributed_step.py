"""One call of DistributedLoss between several ranks: what this rank states, and how the loss is then computed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from contrastive_zoo.arguments import Arguments
from contrastive_zoo.call_history import CallHistory
from contrastive_zoo.collectives import scale_gradient
from contrastive_zoo.common_failure import failing_together
from contrastive_zoo.compiling import gradients_are_computed
from contrastive_zoo.engine.dense_mode import is_dense
from contrastive_zoo.handshake import Statement, refuse_empty
from contrastive_zoo.loss_base.kept_state import state_kept_on_error
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_call import LossCall, loss_name, paired_problem, unequal_problem, without_ddp
from contrastive_zoo.loss_summary import LossModules
from contrastive_zoo.messages import report
from contrastive_zoo.randomness import StateWatch, one_stream
from contrastive_zoo.row_checks import first_non_finite, tolerance
from contrastive_zoo.session import Session, refuse
from contrastive_zoo.small_batch import is_small
from contrastive_zoo.step_state import ComputedFrom, Opening, Replicate
from contrastive_zoo.uneven_ends import join_problem
from contrastive_zoo.world import Shards, World
from contrastive_zoo.wrapper_options import WrapperOptions


class Observer(Protocol):
    """What is told of every call of a wrapper in training mode, after the loss; :class:`contrastive_zoo.Monitor` is one."""

    def compared(self) -> str:
        """Return what must be equal on every rank, so that all send the same messages in ``observe``."""

    def problem(self, rows: Mapping[str, Tensor]) -> str | None:
        """Return why these tensors of a call cannot be observed, in words; None if they can."""

    def observe(self, loss: Any, rows: Mapping[str, Tensor], shards: Sequence[Shards], world: World) -> None:
        """Look at the bare loss and this rank's tensors by name, given the split of each over the ranks."""


class DistributedStep:
    """One call of a wrapper between several ranks.

    The statement opens the step's handshake. All that follows, which messages are sent and whether each rank computes
    its anchors' part or all of the loss, is a function of what every rank received in it.

    Args:
        call: the loss, its miner and its arguments.
        arguments: those of the call.
        modules: of the wrapper's loss, which may be another than the call's.
        options: of the wrapper.
        history: the wrapper's calls before this one.
        session: the ranks.
        observer: is told of the call after the loss; None for no observer.

    Raises:
        ValueError: on every rank alike: this rank's statement cannot be made.
    """

    def __init__(
        self,
        call: LossCall,
        arguments: Arguments,
        modules: LossModules,
        options: WrapperOptions,
        history: CallHistory,
        session: Session,
        observer: Observer | None = None,
    ) -> None:
        self.call, self.arguments, self.modules = call, arguments, modules
        self.options, self.history, self.session, self.observer = options, history, session, observer
        self.name = loss_name(modules.loss)
        self.is_own = call.is_own
        self.args, self.kwargs = call.bound.args, call.bound.kwargs
        try:
            self.opening = Opening(self._statement())
        except Exception as error:  # a setting that cannot be read, for one; the other ranks wait in the handshake
            refuse(self.name, f"{type(error).__name__}: {error}", world=session)

    def compute(self) -> Any:
        """What the loss returns.

        Raises:
            ValueError: on every rank alike, as ``DistributedLoss`` documents.
            CommunicationError: another rank failed, died or is late.
        """
        self.session.progress.opening = self.opening
        before = self.modules.buffer_versions()
        try:
            value = self._own_part_or_all()
        except BaseException as error:
            report(error, self.session)
            raise
        self.history.look_later(self.session.progress.later or ())
        assert self.opening.agreed is not None
        if self.opening.agreed.replicate and self.options.check_equal:
            self.history.remember_value(value)
        self.history.keeps_state = self.modules.buffers_changed(before)
        self.history.calls += 1
        self.history.sizes = self.arguments.sizes
        if self.observer is not None:
            self.observer.observe(self.modules.loss, self.arguments.rows, self.opening.agreed.shards, self.session)
        return value

    def _statement(self) -> Statement:
        """What this rank states in the step's first handshake, besides what a loss of this library declares."""
        call, arguments, session, history = self.call, self.arguments, self.session, self.history
        if self.is_own:
            replicable = without_ddp(call.loss).can_be_replicated(*self.args, **self.kwargs)
        else:
            replicable = self.options.mode == "replicated"
        statement = Statement(
            self.name,
            {**self.modules.settings(third_party=self.options.check_equal), **self._options(), **call.compared}
            | arguments.compared,
            [*arguments.sizes, *arguments.padded_sizes],
            self._problem(),
            last_value=history.last_value(),
            same=arguments.same,
            tolerance=tolerance(arguments.rows.values()),
            replicable=replicable and not (self.is_own and is_dense()),
            draws=history.draws,
            small=functools.partial(_is_small, arguments) if self.is_own else lambda shards: True,
            payload=arguments.payload(session) if replicable else None,
        )
        if self.options.check_equal and (sums := history.state_sums(self.modules)) is not None:
            statement.norm, statement.projection, statement.parameters = sums.norm, sums.projection, sums.by_name
        if self.options.check_distinct and history.calls == 0:
            statement.fingerprint = arguments.fingerprint
        return statement

    def _problem(self) -> str | None:
        """What this rank knows to be wrong before any loss of this library declares itself."""
        call, arguments, session, history = self.call, self.arguments, self.session, self.history
        problem = history.values_problem()
        # stated in the handshake, since a wrapper that was made again on one rank does not know it
        if history.keeps_state and _in_backward():
            problem = problem or _COMPUTED_AGAIN
        if not self.is_own:
            given = call.bound.arguments
            problem = problem or call.indices_problem(session) or unequal_problem(given) or paired_problem(given)
            if problem is None and session.options.check_finite:
                problem = first_non_finite(arguments.rows)
        if self.options.static_shapes:
            problem = problem or history.shapes_problem(arguments)
        if self.observer is not None:
            problem = problem or self.observer.problem(arguments.rows)
        return problem or join_problem()

    def _options(self) -> dict[str, str]:
        """The wrapper's options, torch's modes and the miner's settings, as ranks compare them."""
        compared = self.options.compared()
        compared["dense()"] = str(is_dense())
        compared["torch.is_grad_enabled()"] = str(torch.is_grad_enabled())
        compared["gradients are computed"] = gradients_are_computed()
        if self.observer is not None:
            compared["the monitor"] = self.observer.compared()
        if self.call.miner is not None:
            of_miner = LossModules(self.call.miner).settings(third_party=self.options.check_equal)
            compared |= {"the miner" if name == "the loss" else f"miner.{name}": x for name, x in of_miner.items()}
        return compared

    def _own_part_or_all(self) -> Any:
        """The loss, computed in parts or by every rank alike, as the handshake decides."""
        session, watch = self.session, None
        try:
            if not self.is_own:
                return self._sharded()
            if _runs_once(self.call.loss):
                session.progress.go_on = self._computed_from
                value = self.call.loss(*self.args, **self.kwargs, world=session)
                if session.runs_once:
                    raise ValueError(f"{self.name}: {_NEVER_BEGAN}")
                return value
            if self.modules.runs_third_party_code:
                watch = StateWatch(self.modules.loss, self.arguments.device)
                session.progress.changes = watch.has_changed
            session.declare(self.name, [functools.partial(self.call.loss, *self.args, **self.kwargs, world=session)])
            if watch is not None and watch.has_changed():  # before it declared itself
                watch.undo()
            bound = self.call.bound
            scaled = inspect.BoundArguments(bound.signature, _scaled(bound.arguments, session))
            return self.call.loss(*scaled.args, **scaled.kwargs, world=session)
        except Replicate:
            if watch is not None and watch.has_changed():
                self.history.draws = True
                watch.undo()
        except Exception as error:
            if not session.opened:  # the other ranks wait in the handshake
                refuse(self.name, f"{type(error).__name__}: {error}", world=session)
            raise
        return self._replicated()

    def _sharded(self) -> Any:
        """A third-party loss, computed by each rank for its own anchors."""
        self.session.open(self.name)
        assert self.opening.agreed is not None
        shards = dict(zip(self.arguments.rows, self.opening.agreed.shards, strict=True))
        if shards:
            refuse_empty(self.name, next(iter(shards.values())))
        # imported here: pytorch-metric-learning is an optional dependency
        from contrastive_zoo.adapters.pml_sharded import sharded

        scaled = _scaled(self.call.bound.arguments, self.session)
        return sharded(self.call.loss, self.call.miner, scaled, shards, self.session)

    def _replicated(self) -> Any:
        """The loss of the rows of all ranks, computed by every rank alike: each holds the complete gradient."""
        call, agreed = self.call, self.opening.agreed
        assert agreed is not None
        if agreed.shards:
            refuse_empty(self.name, agreed.shards[0])
        call.bound.arguments = self.arguments.gathered(agreed, self.session)
        draws = not self.is_own or self.modules.runs_third_party_code
        with one_stream(self.session, self.arguments.device) if draws else nullcontext():
            value = self._computed_on_every_rank() if self.is_own else call.mine_and_compute()
        return value

    def _computed_on_every_rank(self) -> Any:
        """An own loss of the gathered rows; one that keeps a state and may fail on some ranks only fails on all of them."""
        bound, modules = self.call.bound, self.modules
        compute = functools.partial(self.call.loss, *bound.args, **bound.kwargs, world=self.session.of_all_rows())
        if not (modules.runs_third_party_code and modules.buffer_versions()):
            return compute()
        with state_kept_on_error(modules.loss):
            return failing_together(self.name, compute, self.session)

    def _computed_from(self, rows: Mapping[str, Tensor]) -> ComputedFrom:
        """What a loss that runs once is computed from after the handshake, given the rows with which it has begun.

        Raises:
            Replicate: every rank computes it, but a hook has replaced the arguments; the hook has to see all ranks' rows.
        """
        agreed, session, own = self.opening.agreed, self.session, self.arguments.rows
        assert agreed is not None
        if not agreed.replicate:
            return ComputedFrom(_scaled(rows, session), session, None)
        if [*map(id, rows.values())] != [*map(id, own.values())]:
            raise Replicate
        refuse_empty(self.name, agreed.shards[0])
        found = self.arguments.gathered_rows(agreed, session).values()
        return ComputedFrom(dict(zip(rows, found, strict=True)), session.of_all_rows(), agreed.shards[0].local)


_NEVER_BEGAN = (
    "it is declared with begins_once=True, but its function does not call begin_once(), and would be computed from rows "
    "whose gradients are too small. Leave begins_once out."
)

_COMPUTED_AGAIN = (
    "a backward pass computes the loss again, as torch.utils.checkpoint does, but its state has moved on since (a memory, a "
    "centre, a running statistic). Put the encoder under the checkpoint and leave the loss out."
)


def _is_small(arguments: Arguments, shards: Sequence[Shards]) -> bool:
    """Whether every rank computes all of an own loss sooner than its part.

    A function beside the class: a bound method in the statement would be a reference cycle, in which the embeddings stay
    in memory until Python's garbage collector runs.
    """
    return is_small(arguments.total(shards), arguments.width)


def _runs_once(loss: Any) -> bool:
    """Whether the loss is nothing but a function that calls ``begin_once``."""
    return isinstance(loss, Loss) and loss.begins_once and type(loss).forward is Loss.forward


def _in_backward() -> bool:
    """Whether autograd runs a backward pass in this thread, within which a checkpoint computes its forward pass again."""
    return torch._C._current_graph_task_id() != -1


def _scaled(arguments: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Rows whose gradients come out W times as large; a single number is a parameter, whose gradient is complete."""
    done: dict[int, tuple[Any, Any]] = {}  # a tensor that is passed twice stays one tensor, as a loss may ask

    def scaled(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.ndim == 0:
            return x
        if id(x) not in done:
            done[id(x)] = x, scale_gradient(x, world.size)
        return done[id(x)][1]

    found: dict[str, Any] = tree_map(scaled, dict(arguments))
    return found
