"""Check in one call whether a loss is the same function on any number of processes, and diagnose it if it is not."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis.errors import HypothesisException, NoSuchExample

from contrastive_zoo.testing import invariants
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.diagnosis import Diagnosis, diagnose
from contrastive_zoo.testing.invariants import INVARIANTS, STEP_INVARIANTS, TRAINING_INVARIANTS, Broken, Invariant
from contrastive_zoo.testing.measurement import Call, Case, GradReduction, call_form
from contrastive_zoo.testing.strategies import ADVERSARIAL, ORDINARY, global_batches
from contrastive_zoo.testing.trial import Trial
from contrastive_zoo.testing.worlds import RankError, Worlds

SHRINKING = 4.0
"""Time limit in seconds for shrinking a counterexample."""

MOST_FAILURES = 3
"""The check stops after so many batches on which a rank raises or hangs."""

IMPORTING = 120.0
"""Timeout in seconds for the first construction of the loss, which imports its modules on every rank."""


@dataclass
class Finding:
    """An invariant that is broken, with the smallest batch found that shows it.

    Args:
        invariant: the broken invariant.
        message: the value found and the value expected.
        batch: the global batch.
    """

    invariant: Invariant
    message: str
    batch: GlobalBatch


@dataclass
class Report:
    """The result of a check.

    Args:
        name: name of the loss.
        world_sizes: the world sizes W tested.
        grad_reduction: whether the trainer is assumed to average or sum gradients over ranks.
        examples: number of global batches tested.
        findings: one for each broken invariant, the most basic first.
        diagnosis: the mistake and its fix; None if no invariant is broken.
        seconds: duration of the check.
    """

    name: str
    world_sizes: tuple[int, ...]
    grad_reduction: GradReduction
    examples: int = 0
    findings: list[Finding] = field(default_factory=list)
    diagnosis: Diagnosis | None = None
    seconds: float = 0.0
    tried: frozenset[str] = frozenset()
    """Names of the invariants that applied to at least one batch."""

    def holds(self, invariant: Invariant) -> bool | None:
        """Whether an invariant held on every batch; None if it was not tried."""
        if any(found.invariant is invariant for found in self.findings):
            return False
        return True if invariant.name in self.tried else None

    @property
    def ok(self) -> bool:
        """Whether every invariant that was tried held on every batch."""
        return not self.findings

    def __str__(self) -> str:
        trainer = f"a trainer that {'averages' if self.grad_reduction == 'mean' else 'sums'} gradients"
        where = f"W = {', '.join(map(str, self.world_sizes))}, {self.examples} global batches, {trainer}"
        if self.ok:
            return f"{self.name} is the same function on any number of processes ({where})."
        lines = [f"{self.name} is not the same function on any number of processes ({where})."]
        lines += [
            f"  {found.invariant}: {found.message}\n      at {found.batch}   # {found.batch!r}"
            for found in self.findings
        ]
        return "\n".join([*lines, f"Diagnosis: {self.diagnosis}"])

    def as_dict(self) -> dict[str, Any]:
        """The report in plain types, for JSON."""
        broken = {found.invariant.name: found for found in self.findings}
        return {
            "loss": self.name,
            "ok": self.ok,
            "world_sizes": list(self.world_sizes),
            "grad_reduction": self.grad_reduction,
            "examples": self.examples,
            "seconds": round(self.seconds, 2),
            "invariants": {
                invariant.name: {
                    "holds": False,
                    "message": broken[invariant.name].message,
                    "batch": repr(broken[invariant.name].batch),
                }
                if invariant.name in broken
                else {"holds": self.holds(invariant)}
                for invariant in INVARIANTS
            },
            "diagnosis": None
            if self.diagnosis is None
            else {"mistake": self.diagnosis.mistake, "why": self.diagnosis.why, "fix": self.diagnosis.fix},
        }


class NotInvariant(AssertionError):  # noqa: N818
    """A loss depends on the number of processes; ``report`` has the details."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


def check_world_size_invariance(
    make_loss: Callable[[], Any],
    *,
    world_sizes: Sequence[int] = (1, 2, 3, 4),
    call: Call | Literal["auto"] = "auto",
    grad_reduction: GradReduction = "mean",
    max_examples: int = 30,
    level: Literal["loss", "training_step"] = "loss",
    width: int | None = None,
    worlds: Worlds | None = None,
    name: str | None = None,
) -> Report:
    """Check that a loss is the same function on W processes as on one: value, encoder gradient, parameter gradient.

    The check draws global batches with even, uneven and empty shards and with labels of all kinds. One process and W
    real processes compute the loss of each batch, and every invariant of :mod:`contrastive_zoo.testing.invariants` is
    tested on the results. At level ``"training_step"`` the check tests your whole step, with its gathering, hooks and
    gradient scaling.

    Args:
        make_loss: returns the loss, a module or function of this rank's embeddings; runs on every rank, in its process
            group. At level ``"training_step"`` it returns ``(model, step)``: ``step(model, *rows)`` takes features [n, 3]
            (and labels), runs forward, backward and the reduction of gradients, leaves the gradients in ``.grad`` and
            returns the loss.
        world_sizes: the world sizes W to test.
        call: ``"labels"`` for ``loss(embeddings, labels)``, ``"views"`` for ``loss(view1, view2)``; ``"auto"`` infers the
            call form from the names of the loss's parameters.
        grad_reduction: whether the trainer averages (``"mean"``) or sums (``"sum"``) gradients over ranks.
        max_examples: number of global batches to draw.
        level: ``"loss"`` or ``"training_step"``.
        width: width of the embeddings, where the loss fixes it (proxies, class weights); labels are below 64.
        worlds: a pool of process groups to use; None starts one.
        name: name of the loss in the report.

    Returns:
        The report of a loss that satisfies all invariants.

    Raises:
        NotInvariant: an invariant is broken; the message names the smallest batch found, the diagnosis and the fix.
        ValueError: the loss fails on one process, or a setting is unknown.

    Example:
        >>> import contrastive_zoo as cz
        >>> report = check_world_size_invariance(
        ...     lambda: cz.DistributedLoss(cz.SupCon()), world_sizes=(1, 2), max_examples=3
        ... )
        >>> report.ok
        True
    """
    report = examine(
        make_loss,
        world_sizes=world_sizes,
        call=call,
        grad_reduction=grad_reduction,
        max_examples=max_examples,
        level=level,
        width=width,
        worlds=worlds,
        name=name,
    )
    if not report.ok:
        raise NotInvariant(report)
    return report


def examine(
    make_loss: Callable[[], Any],
    *,
    world_sizes: Sequence[int] = (1, 2, 3, 4),
    call: Call | Literal["auto"] = "auto",
    grad_reduction: GradReduction = "mean",
    max_examples: int = 30,
    level: Literal["loss", "training_step"] = "loss",
    width: int | None = None,
    worlds: Worlds | None = None,
    name: str | None = None,
    on_example: Callable[[int], None] = lambda count: None,
) -> Report:
    """Like :func:`check_world_size_invariance`, but return the report of a broken loss instead of raising.

    Args:
        on_example: called with the number of batches tested so far.

    Raises:
        ValueError: the loss fails on one process, or a setting is unknown.

    Example:
        >>> report = examine(lambda: (lambda embeddings, labels: embeddings.square().sum()), max_examples=5)
        >>> report.ok, report.diagnosis.mistake
        (False, 'local negatives')
    """
    _known(world_sizes=world_sizes, call=call, grad_reduction=grad_reduction, level=level)
    start = time.monotonic()
    with ExitStack() as stack:
        pool = worlds or stack.enter_context(Worlds(timeout=4.0, grace=0.3))
        pool.start(1, *world_sizes)
        found = [
            pool.run(size, _call_form, make_loss, timeout=IMPORTING)[0] for size in dict.fromkeys([1, *world_sizes])
        ]
        if call == "auto":
            call = found[0]
        step = level == "training_step"
        case = Case(
            make_loss, call, grad_reduction, step=step, name=name or str(getattr(make_loss, "__name__", "loss"))
        )
        examination = _Examination(case, pool, tuple(world_sizes), width, on_example)
        examination.survey(max_examples)
        examination.train()
        findings = [examination.shrunk(invariant) for invariant in INVARIANTS if invariant.name in examination.broken]
        report = Report(case.name, tuple(world_sizes), grad_reduction, examination.examples, findings)
        report.tried = frozenset(examination.tried)
        if findings:
            report.diagnosis = diagnose(case, [found.invariant.name for found in findings], pool, width=width or 3)
    report.seconds = time.monotonic() - start
    return report


class _Examination:
    """Test all invariants on many batches; keep the first failure of each and shrink it."""

    def __init__(
        self,
        case: Case,
        worlds: Worlds,
        world_sizes: tuple[int, ...],
        width: int | None,
        on_example: Callable[[int], None],
    ) -> None:
        self.case, self.worlds, self.world_sizes, self.width = case, worlds, world_sizes, width
        self.on_example = on_example
        self.unusable: RankError | None = None
        self.failures = 0
        self.batches = partial(global_batches, world_sizes, width=width)
        self.examples = 0
        self.broken: dict[str, Finding] = {}
        self.tried: set[str] = set()

    def survey(self, max_examples: int) -> None:
        """Test three fixed batches for each W, then drawn ones; one drawn batch in five has adversarial samples."""
        width = self.width or 3
        fixed = [GlobalBatch((3,) * world_size, d=width) for world_size in self.world_sizes]
        fixed += [GlobalBatch(tuple(range(1, world_size + 1)), d=width) for world_size in self.world_sizes]
        fixed += [GlobalBatch((2,) * world_size, d=width, rows="huge") for world_size in self.world_sizes]
        for batch in fixed[:max_examples]:
            self._try(batch)
        left = max(0, max_examples - len(fixed))
        for rows, share in ((ORDINARY, left - left // 5), (ADVERSARIAL, left // 5)):
            if share:
                drawn = given(batch=self.batches(rows=rows))(self._try_drawn)
                settings(
                    max_examples=share,
                    deadline=None,
                    database=None,
                    derandomize=True,
                    phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                )(drawn)()
        if self.examples == 0:
            raise ValueError(
                f"{self.case.name}: raises on one process, so there is no reference to compare with. "
                f"It was called with {'two views' if self.case.call == 'views' else 'embeddings and labels'}; pass "
                f"call='labels' or 'views' if that is wrong. {self.unusable}"
            )

    def _try_drawn(self, batch: GlobalBatch) -> None:
        self._try(batch)

    def _try(self, batch: GlobalBatch) -> None:
        unequal = len(set(batch.shards)) > 1
        if (self.failures and unequal) or self.failures == MOST_FAILURES:
            return  # it fails on such shards, and each attempt may cost a timeout
        trial = Trial(self.case, batch, self.worlds)
        try:
            trial.alone()
        except RankError as error:  # no loss of one process to compare with
            self.unusable = error
            return
        self.examples += 1
        self.on_example(self.examples)
        for invariant in STEP_INVARIANTS:
            still_open = invariant.name not in self.broken or invariant is invariants.runs_on_every_split
            if still_open and _applies(invariant, batch):
                finding = self._finding(invariant, trial)
                if finding is not None:
                    self.broken.setdefault(finding.invariant.name, finding)
                if finding is not None and finding.invariant is invariants.runs_on_every_split:
                    self.failures += 1
                    return  # every further invariant would wait for the same rank

    def train(self) -> None:
        """Test the training invariants once for each W, if no invariant of a single step is broken."""
        for world_size in () if self.broken else self.world_sizes:
            trial = Trial(self.case, GlobalBatch((3,) * world_size, d=self.width or 3), self.worlds)
            for invariant in TRAINING_INVARIANTS:
                finding = None if invariant.name in self.broken else self._finding(invariant, trial)
                if finding is not None:
                    self.broken[finding.invariant.name] = finding

    def shrunk(self, invariant: Invariant) -> Finding:
        """Return the finding of this invariant on the smallest batch found within the time limit."""
        best = self.broken[invariant.name]
        deadline = time.monotonic() + SHRINKING / len(self.broken)

        def fails(batch: GlobalBatch) -> bool:
            nonlocal best
            if time.monotonic() > deadline or not _applies(invariant, batch):
                return False
            found = self._finding(invariant, Trial(self.case, batch, self.worlds))
            if found is not None and _size(batch) < _size(best.batch):
                best = found
            return found is not None

        rows = ADVERSARIAL if invariant is invariants.finite_at_extremes else ORDINARY[:1]
        quiet = settings(
            max_examples=40, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
        )
        with suppress(NoSuchExample, HypothesisException):  # the time limit ended the search: keep the best
            find(self.batches(rows=rows), fails, settings=quiet)
        return best

    def _finding(self, invariant: Invariant, trial: Trial) -> Finding | None:
        try:
            if invariant(trial):
                self.tried.add(invariant.name)
        except Broken as broken:
            return Finding(invariant, str(broken), trial.batch)
        except RankError as error:
            return Finding(invariants.runs_on_every_split, str(error).partition("\n")[0], trial.batch)
        return None


def _applies(invariant: Invariant, batch: GlobalBatch) -> bool:
    """Whether to test the invariant on this batch: at adversarial samples gradients may not exist, only be finite."""
    return (batch.rows in ADVERSARIAL) == (invariant is invariants.finite_at_extremes)


def _size(batch: GlobalBatch) -> tuple[int, ...]:
    plain = (batch.labels == "mixed") + (batch.rows == "gaussian")
    return (len(batch.shards), batch.total, batch.d, -plain, batch.seed, *batch.shards)


def _call_form(make_loss: Callable[[], Any]) -> Call:
    made = make_loss()
    return call_form(made[1] if isinstance(made, tuple) else made)


def _known(**given: Any) -> None:
    choices: dict[str, tuple[str, ...]] = {
        "call": ("auto", "labels", "views"),
        "grad_reduction": ("mean", "sum"),
        "level": ("loss", "training_step"),
    }
    for name, allowed in choices.items():
        if given[name] not in allowed:
            raise ValueError(f"{name} is one of {', '.join(allowed)}, got {given[name]!r}.")
    if not given["world_sizes"] or min(given["world_sizes"]) < 1:
        raise ValueError(f"world_sizes are numbers of processes, at least 1 each, got {list(given['world_sizes'])}.")
