"""One call of DistributedLoss between several ranks: state, shake hands, choose, compute."""

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.implementation import CHOOSES_KERNELS, NO_KERNELS, is_dense
from contrastive_zoo.engine.plan import Needs, Plan, Situation, choose
from contrastive_zoo.loss_base.loss import CallInputs, Loss
from contrastive_zoo.loss_base.loss_modules import LossModules, without_ddp
from contrastive_zoo.loss_base.state import COMPUTED_AGAIN, state_kept_on_error
from contrastive_zoo.ranks.adjoints import device_of, gathered_rows, scale_gradient
from contrastive_zoo.ranks.compat import in_backward
from contrastive_zoo.ranks.devices import float32_matmuls, on_cpu
from contrastive_zoo.ranks.differences import copies_difference, failing_together
from contrastive_zoo.ranks.fingerprint import REPEATED, equal_arguments
from contrastive_zoo.ranks.handshake import Agreed, Statement, refuse_empty, reserve_payload, shake_hands
from contrastive_zoo.ranks.messages import report, reported
from contrastive_zoo.ranks.one_process import in_one_process
from contrastive_zoo.ranks.randomness import draw_from_generators, generators_kept, one_stream
from contrastive_zoo.ranks.row_checks import first_non_finite, in_one_line, row_kind, tolerance, values_problem
from contrastive_zoo.ranks.session import Session, refuse
from contrastive_zoo.ranks.suggestions import warn_once
from contrastive_zoo.ranks.transport import flat_bytes, payload_of, row_bytes, unpacked
from contrastive_zoo.ranks.world import Shards
from contrastive_zoo.wrapper.call_history import CallHistory, join_problem
from contrastive_zoo.wrapper.loss_call import NOT_WHOLE, LossCall
from contrastive_zoo.wrapper.roles import NO_ROLES, role_problem, row_numbers_problem, views_warning

T = TypeVar("T")

_SAMPLES, _SAMPLE_BYTES = 256, 2**16
"""Rows of all ranks, and bytes of one, that are compared at most: rounding up, a millisecond at few of the calls."""

ROLES = "the roles of arguments"  # what ranks compare ``shared`` and ``batch_dim`` as


@dataclass
class DistributedStep(ABC):
    """One call of a wrapper between several ranks: what it does is a function of what all have received in a handshake."""

    name: str  # of the loss, the first word of errors
    call: Any  # what this rank states of its call
    options: Any  # the wrapper, whose attributes are the options
    bare: Any  # its loss without DDP, which may be another than the call's
    session: Session

    def __post_init__(self) -> None:
        self.modules = LossModules(self.bare, third_party=self.options.check_equal)
        self.rows: Mapping[str, Tensor] = self.call.inputs.rows  # whose dimension 0 counts samples
        self.history: CallHistory = self.options._history
        self.observer = self.options._observer if self.options.training else None  # a Monitor, or None

    @abstractmethod
    def statement(self) -> Statement:
        """What this rank states of the arguments; as its state, numbers that arguments or modules as settings have given."""

    @abstractmethod
    def plan(self, agreed: Agreed, equal: Mapping[str, int]) -> Plan:
        """The path of the step, the same on every rank, given the arguments that are equal on all."""

    @abstractmethod
    def value(self, agreed: Agreed, plan: Plan) -> Any:
        """The loss, computed as all ranks have agreed."""

    @property
    def few(self) -> int:
        """How many rows of each tensor a rank sends for a small batch of samples of all ranks."""
        of_row = max(1, sum(map(row_bytes, self.rows.values())))
        return max(1, min(_SAMPLES // self.session.size, _SAMPLE_BYTES // of_row))

    def compute(self) -> Any:
        history, session = self.history, self.session
        history.enter(session.state)
        try:
            statement = self._completed(self.statement())
        except Exception as error:  # a setting that cannot be read, for one; the other ranks wait in the handshake
            refuse(self.name, f"{type(error).__name__}: {error}", world=session)
        except BaseException as error:  # Ctrl-C
            report(error, session)
            raise
        before = self.modules.buffer_versions() if self.modules.has_buffers else []
        agreed = shake_hands(statement, session)
        history.wrapper = agreed.wrapper
        session.state.wrappers[agreed.wrapper] = history
        if agreed.shards:
            refuse_empty(self.name, agreed.shards[0])
        equal, copies = equal_arguments(self.rows, agreed.digests)
        if copies:
            accepts = "check_distinct=False accepts equal embeddings."
            raise ValueError(f"{self.name}: {copies_difference(copies, session.size)} {accepts}")
        plan = self.plan(agreed, equal)
        of_all = plan.work == "all on every rank"
        compares = self.options.check_equal and not of_all and history.compares(history.calls)
        session.findings.anchors = {} if compares else None
        history.due = agreed.compares and not of_all
        of_sample = self.few * sum(map(row_bytes, self.rows.values())) if history.due else 0
        reserve_payload(agreed.needed if of_all else of_sample, session)
        self.session = session = replace(session, opened=agreed.number)
        with reported(session):
            value = self.value(agreed, plan)
        history.look_at_values(self.name, session.findings, positives=self.options.check_finite)
        if of_all and self.options.check_equal:
            history.remember_value(value)
        history.draws |= session.findings.draws
        history.keeps_state = self.modules.has_buffers and self.modules.buffers_changed(before)
        history.calls += 1
        if self.observer is not None:
            self.observer.observe(self.modules.loss, self.rows, agreed.shards, session)
        return value

    def _completed(self, statement: Statement) -> Statement:
        """The statement with settings, options, and what earlier calls have left to compare."""
        history, options = self.history, self.options
        of_wrapper = {name: str(getattr(options, name)) for name in ("grad_reduction", "training", "ring")}
        roles = options._roles()
        of_wrapper[ROLES] = "" if roles is NO_ROLES else str(roles)
        compared = _with_names_apart(self.modules.settings(), of_wrapper)
        compared["plain_formulas()"] = str(is_dense())
        compared["torch.is_grad_enabled()"] = str(torch.is_grad_enabled())
        if not all(map(on_cpu, self.rows.values())):
            compared["float32 matmuls"] = float32_matmuls()
        if self.observer is not None:
            compared["the monitor"] = self.observer.compared()
        # errors name the first difference: another loss, then other arguments, then other options
        first = {name: compared[name] for name in ("the loss", ROLES)}
        statement.compared = {**first, **statement.compared, **_with_names_apart(compared, statement.compared)}
        statement.problem = self._problem(statement)
        statement.results, statement.results_tolerance = history.results(), history.tolerance
        history.tolerance = statement.tolerance  # of what this call leaves to compare
        statement.wrapper, statement.made = history.wrapper, history.made
        state = _with_names_apart(self.modules.numbers(), statement.state) if options.check_equal else None
        compares_rows = options.check_distinct and statement.problem is None
        # sharded class weights differ between ranks in any case
        rows = {name: x for name, x in self.rows.items() if compares_rows and not name.startswith("class weights")}
        now = history.fingerprint(state, rows)
        statement.level, statement.state = now.level, state or {}
        statement.digests = [*{**dict.fromkeys(self.rows, 0), **now.digests}.values()]
        return statement

    def _problem(self, statement: Statement) -> str | None:
        history = self.history
        problem = history.values_problem()
        # stated in the handshake, since a wrapper that was made again on one rank does not know it
        if history.keeps_state and in_backward():
            problem = problem or COMPUTED_AGAIN
        problem = problem or statement.problem or (None if history.calls else self.modules.lazy_problem())
        problem = problem or (first_non_finite(self.rows) if self.session.check_finite else None)
        problem = problem or (None if self.observer is None else self.observer.problem(self.rows))
        return problem or join_problem()

    def all_or_none(self, compute: Callable[[], Any]) -> Any:
        """The value of a user's loss, by rank 0's random numbers; with a state it fails on all ranks or on none."""
        with one_stream(self.session, device_of(self.rows)):
            if not self.modules.buffer_versions():
                return compute()
            with state_kept_on_error(self.modules.loss):
                return failing_together(self.name, compute, self.session)


def _with_names_apart(of_loss: Mapping[str, T], others: Mapping[str, T]) -> dict[str, T]:
    """Both tables: a loss may have an attribute with the name of an option or of an argument, which would hide it."""
    if others.keys().isdisjoint(of_loss):
        return {**of_loss, **others}
    return {f"the loss's {name}" if name in others else name: x for name, x in of_loss.items()} | dict(others)


@dataclass
class OwnStep(DistributedStep):
    call: CallInputs
    compute_batch: Callable[[Batch], Any]

    def statement(self) -> Statement:
        stated, inputs, rows = self.call, self.call.inputs, self.call.inputs.rows
        compared = {name: row_kind(x, device=x.is_floating_point()) for name, x in rows.items()}
        compared["the passed arguments"] = ", ".join(rows)
        compared["implementation"] = CHOOSES_KERNELS if stated.kernels is NO_KERNELS else str(stated.kernels)
        compared |= {name: in_one_line(x) for name, x in stated.compared.items() if not isinstance(x, Tensor)}
        problem, can_compute_all = stated.problem, stated.needs.split is None
        if inputs.values and problem is None:
            problem = values_problem(inputs.values, self.session.findings.later, waits=False)
        if inputs.whole and not can_compute_all:
            problem = problem or NOT_WHOLE
        history, payload = self.history, None
        if can_compute_all and history.due:
            few, device = self.few, self.session.host_device
            payload = [flat_bytes(x[:few].detach().to(device)) for x in rows.values()]
        elif can_compute_all:
            payload = payload_of(rows.values(), self.session)
        return Statement(
            self.name,
            compared,
            [*map(len, rows.values())],
            problem,
            state={name: x for name, x in stated.compared.items() if isinstance(x, Tensor)},
            tolerance=tolerance(rows.values()),
            kernels=stated.kernels.apply,
            draws=history.draws,
            payload=payload,
            is_sample=history.due,
            compares=can_compute_all and self.modules.runs_third_party_code and self.modules.has_own_formula
            and self.options.check_equal and history.compares(history.calls + 1),
        )  # fmt: skip

    def compare_behaviour(self, value: Any, agreed: Agreed) -> None:
        """Start to compare how ranks compute a loss of which each computes a part."""
        history = self.history
        for name, number in (self.session.findings.anchors or {}).items():
            history.remember(name, number)
        if not self.modules.has_own_formula:
            return
        if isinstance(value, Tensor) and value.ndim == 0:
            history.remember_value(value)
            history.remember_gradients(value, self.modules.shared_state(), self.rows)
        if agreed.sample is not None:
            with suppress(Exception):  # a formula may need more samples
                history.remember("sample", self._loss_of_sample(agreed.sample, agreed.shards))

    @torch.no_grad()
    def _loss_of_sample(self, sample: Tensor, shards: Sequence[Shards]) -> Tensor:
        """The loss of a few samples of all ranks, which every rank computes from a copy of the loss.

        Rank 0 returns its first result and the others a second one, which differs if a generator of the loss is drawn from.
        """
        few = [Shards(tuple(min(self.few, n) for n in of.sizes)) for of in shards]
        on_host = unpacked(sample.cpu(), [x[:0].detach().cpu() for x in self.rows.values()], few)
        moved = {name: x.to(of.device) for (name, of), x in zip(self.rows.items(), on_host, strict=True)}
        of_one = [Shards((len(x),)) for x in on_host]
        plan = self.call.plan(of_one, 1)
        batch = self.call.batch(moved, of_one, Session(check_finite=False), plan)

        def result(*, draws: bool) -> Tensor:
            copies: dict[int, Any] = {}
            loss, device = copy.deepcopy(self.bare, copies), device_of(self.rows)
            with generators_kept(device):
                if draws:
                    draw_from_generators([*copies.values()], device)
                return in_one_process(lambda: loss.compute(batch), self.name, self.session, loss).sum()

        first, second = result(draws=False), result(draws=True)
        return first if self.session.rank == 0 else second

    def plan(self, agreed: Agreed, equal: Mapping[str, int]) -> Plan:
        return self.call.plan(
            agreed.shards,
            self.session.size,
            ring=self.options.ring,
            random=agreed.draws,
            payload=agreed.payload is not None,
            kernels=self.call.kernels.on_ranks(agreed.kernels) if any(agreed.kernels) else self.call.kernels,
        )

    def value(self, agreed: Agreed, plan: Plan) -> Any:
        session, rows, stated = self.session, self.rows, self.call
        if plan.work == "own anchors":
            session = replace(session, ring=plan.movement == "ring")
            scaled = {name: scale_gradient(x, session.size) for name, x in rows.items()}
            value = self.compute_batch(stated.batch(scaled, agreed.shards, session, plan))
            if session.findings.anchors is not None:
                self.compare_behaviour(value, agreed)
            return value
        gathered = gathered_rows(rows, agreed.shards, agreed.payload, session)
        alone = Session(check_finite=False, findings=session.findings)
        shards = [Shards((len(x),)) for x in gathered.values()]
        batch = stated.batch(gathered, shards, alone, plan, agreed.shards[0].local)
        if not self.modules.runs_third_party_code:
            return self.compute_batch(batch)
        compute = functools.partial(self.compute_batch, batch)
        return self.all_or_none(lambda: in_one_process(compute, self.name, session, self.modules.loss))


@dataclass
class ThirdPartyStep(DistributedStep):
    """A call of any other loss, which every rank computes from the samples of all ranks."""

    call: LossCall

    @property
    def without_role(self) -> set[str]:
        """The arguments that may not hold samples in dimension 0."""
        if isinstance(without_ddp(self.call.loss), Loss):
            return set()
        roles = self.call.roles
        return {*self.rows} if roles is NO_ROLES else {path for path in self.rows if roles.dim(path) is None}

    def plan(self, agreed: Agreed, equal: Mapping[str, int]) -> Plan:
        # first refuse arguments that no single rank can know to be wrong
        counts = {path: of.sizes for path, of in zip(self.rows, agreed.shards, strict=False)}
        without_role = self.without_role
        if (problem := role_problem(self.rows, counts, equal, without_role, self.call.variadic)) is not None:
            raise ValueError(f"{self.name}: {problem}")
        numbered = [path for path, numbers in equal.items() if path in without_role and numbers == REPEATED]
        for path in self.history.equal_again(numbered):
            warn_once(f"{self.name}: {_EQUAL_AGAIN.format(path=path, quoted=repr(path))}")
        if (warning := views_warning(self.rows, counts, without_role)) is not None:
            warn_once(f"{self.name}: {warning}")
        return choose("", FROM_ELSEWHERE, Situation(self.session.size, payload=agreed.payload is not None))

    def statement(self) -> Statement:
        call, arguments = self.call, self.call.inputs
        of_miner = {}
        if call.miner is not None:
            settings = LossModules(call.miner, third_party=self.options.check_equal).settings()
            of_miner = {"the miner" if name == "the loss" else f"miner.{name}": x for name, x in settings.items()}
        numbers = {path: x for path, x in arguments.leaves.items() if isinstance(x, Tensor) and x.ndim == 0}
        return Statement(
            self.name,
            of_miner | arguments.compared,
            [*map(len, arguments.rows.values())],
            call.problem(self.session)
            or (None if self.history.calls else row_numbers_problem(self.rows, self.without_role)),
            state=numbers | {f"the shared {path}": x for path, x in arguments.shared.items()},
            same=arguments.same,
            tolerance=tolerance(arguments.rows.values()),
            payload=payload_of(self.rows.values(), self.session),
        )

    def value(self, agreed: Agreed, plan: Plan) -> Any:
        call, session = self.call, self.session
        call.bound.arguments = call.inputs.gathered(agreed, session)
        if isinstance(without_ddp(call.loss), Loss):  # with a forward of its own, or hooks
            return self.all_or_none(functools.partial(call.mine_and_compute, session))
        with one_stream(session, device_of(self.rows)):
            return call.mine_and_compute(session)


FROM_ELSEWHERE = Needs(whole="the loss compares samples in a way of its own: each rank computes all of it")
"""What a third-party loss asks of a plan, and one of this library with a ``forward`` of its own or hooks."""


_EQUAL_AGAIN = (
    "{path} was equal on every rank at two calls in a row. If each rank numbers its samples from 0, as torch.arange(n) does,"
    " number those of all ranks, such as torch.arange(n) + rank * n. If it is one tensor for all ranks, pass "
    "DistributedLoss(loss, shared={{{quoted}}}). batch_dim={{{quoted}: 0}} says that its samples are equal by chance."
)
