"""Check in one call whether a loss is the same function on any number of processes, and diagnose it if it is not."""

import inspect
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from importlib import import_module
from itertools import chain
from typing import Any, Literal

from contrastive_zoo.ranks.suggestions import needed

with needed("contrastive_zoo.testing", "contrastive_zoo[testing]"):
    from hypothesis import HealthCheck, Phase, find, given, settings
    from hypothesis.errors import HypothesisException
from torch import nn

from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.testing import invariants, measurement
from contrastive_zoo.testing.batch import ADVERSARIAL, ORDINARY, GlobalBatch, global_batches, uneven
from contrastive_zoo.testing.invariants import CONTRACT, Broken, Invariant, finite_at_extremes, runs_on_every_split
from contrastive_zoo.testing.loss_evidence import LossEvidence
from contrastive_zoo.testing.measurement import Call, Case, GradReduction, Trial
from contrastive_zoo.testing.mistakes import diagnose
from contrastive_zoo.testing.report import Finding, NotInvariant, Report, require_world_sizes
from contrastive_zoo.testing.worlds import RankError, Worlds, WorldTimeout

__all__ = ["Finding", "NotInvariant", "Report", "check_world_size_invariance", "examine"]
CONSTRUCTION_TIMEOUT = 120.0  # seconds for the loss's construction, which imports its modules
FIRST_CALL_FACTOR = 10.0  # a first call, which may compile, may take so many timeouts
SHORT_CALL = 2.0  # seconds of a first call that need no longer timeout
SHRINKING = 4.0  # time limit in seconds for shrinking all counterexamples of a check
MOST_FAILURES = 3  # the search stops after so many batches on which a rank raises or hangs: each may cost a timeout
MOST_AVERAGED = 2  # batches on which many calls of a loss with random numbers are compared, where a single one differs

# recording loads it: not within the time-out of ranks in threads, which would end its import
COMPILER = "torch._dynamo"

# Every search: the same batches in every run
SEARCH = settings(deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
DEFAULT_WIDTH = 3  # width of the embeddings in fixed batches, where the loss does not fix it


def check_world_size_invariance(
    make_loss: Callable[[], Any],
    *,
    world_sizes: Sequence[int] = (1, 2, 3, 4),
    call: Call | Literal["auto"] = "auto",
    grad_reduction: GradReduction = "mean",
    max_examples: int = 30,
    width: int | None = None,
    timeout: float = 4.0,
    threads: bool = False,
    worlds: Worlds | None = None,
    name: str | None = None,
) -> Report:
    """Check that a loss is the same function on W processes as on one: value and gradients.

    The check draws global batches with even, uneven and empty shards. One process and W processes compute each, and every
    invariant of :mod:`contrastive_zoo.testing.invariants` is tested, those of several backward passes on the fewest ranks.
    To compare a whole training, call :func:`contrastive_zoo.testing.audit`.

    Args:
        make_loss: returns the loss, a module or function of this rank's embeddings; runs on every rank.
        world_sizes: the world sizes W to test.
        call: ``"labels"`` for ``loss(embeddings, labels)``, ``"views"`` for ``loss(view1, view2)``, or as many views as
            the loss requires; ``"auto"`` calls with labels if a parameter is named labels, label, y, target or targets.
        grad_reduction: whether the trainer averages (``"mean"``) or sums (``"sum"``) gradients.
        max_examples: number of batches.
        width: width of the embeddings, where the loss fixes it (proxies, class weights); labels are below 64.
        timeout: seconds for one global batch; ten times that for a first call, which may compile, and once ranks were slow.
        threads: ranks are up to 64 threads of this process (:class:`~contrastive_zoo.testing.worlds.Worlds`).
        worlds: a pool of process groups, with its own timeout; None starts one.
        name: of the loss in the report.

    Returns:
        The report, if all invariants hold.

    Raises:
        NotInvariant: an invariant is broken; the message names a small batch, the diagnosis and the fix.
        ValueError: the loss fails on one process, or does not return there, or a setting is unknown.

    Examples:
        >>> import contrastive_zoo as cz
        >>> check_world_size_invariance(lambda: cz.DistributedLoss(cz.SupCon()), world_sizes=(1, 2), max_examples=3).ok
        True
    """
    require_world_sizes(world_sizes)
    choices = {"call": (call, "auto", "labels", "views"), "grad_reduction": (grad_reduction, "mean", "sum")}
    for setting, (value, *allowed) in choices.items():
        if value not in allowed:
            raise ValueError(f"{setting} is one of {', '.join(allowed)}, got {value!r}.")
    world_sizes = tuple(sorted(set(world_sizes)))
    start = time.monotonic()
    with ExitStack() as stack:
        pool = worlds or stack.enter_context(Worlds(timeout=timeout, grace=0.3, threads=threads))
        try:
            inferred, made = pool.run(1, _call_form, make_loss, timeout=CONSTRUCTION_TIMEOUT)[0]
        except RankError as error:
            raise ValueError(f"the loss cannot be constructed: {invariants.first_line(error)}") from error
        if inferred is None:
            raise ValueError(f"make_loss is a function that returns a loss, which is callable; it returned {made}.")
        pool.start(1, *world_sizes)
        patience = FIRST_CALL_FACTOR * pool.timeout
        if not pool.threads:  # ranks import its modules, too, which on a busy machine takes longer than a batch
            with suppress(RankError):  # a construction that fails on several ranks is reported below
                for size in (w for w in world_sizes if w > 1):
                    pool.run(size, _call_form, make_loss, timeout=patience)
        first_call = time.monotonic()
        form, views = inferred if call == "auto" else (call, inferred[1])
        case = Case(make_loss, form, grad_reduction, views, name=name or str(getattr(make_loss, "__name__", "loss")))
        batch = GlobalBatch((4,), d=width or DEFAULT_WIDTH)
        plan = measurement.Plan(record=not pool.threads)  # which loads the compiler, too
        try:
            pool.run(1, measurement.measure, case, (batch,), plan, timeout=patience)
        except WorldTimeout as error:
            raise ValueError(f"the first call does not end on one process. {error}") from error
        except RankError:  # a loss that fails is reported below
            pass
        stack.callback(setattr, pool, "timeout", pool.timeout)
        slow = max(0.0, time.monotonic() - first_call - SHORT_CALL)
        pool.timeout += 2 * max(world_sizes) * slow  # all ranks may compile at the same time
        examination = Examination(case, pool, world_sizes, width)
        examination.survey(max_examples)
        examination.train()
        broken, report = examination.broken, examination.report
        report.findings = [examination.shrunk(x) for x in invariants.INVARIANTS if x.name in broken]
        if report.findings:
            report.notes += [case.called] if call == "auto" else []
            failing = next((x.batch for x in report.findings if x.invariant is runs_on_every_split), None)
            import_module(COMPILER)
            evidence = LossEvidence(case, [*broken], pool, width=width or DEFAULT_WIDTH, failing=failing)
            report.diagnosis = diagnose(evidence)
    report.seconds = time.monotonic() - start
    __tracebackhide__ = True
    if not report.ok:
        raise NotInvariant(report)
    return report


def examine(make_loss: Callable[[], Any], **settings: Any) -> Report:
    """Like :func:`check_world_size_invariance`, but return the report of a broken loss instead of raising."""
    try:
        return check_world_size_invariance(make_loss, **settings)
    except NotInvariant as broken:
        return broken.report


def call_form(loss: Any) -> tuple[Call, int]:
    """Infer the call form of a loss from its parameters, and the number of its views: those that it requires, or two."""
    inner = getattr(loss, "loss", None) or getattr(loss, "module", None)
    if inner is not None and callable(inner) and type(loss).__name__.startswith("Distributed"):
        return call_form(inner)
    function = loss.inputs if isinstance(loss, Loss) else loss.forward if isinstance(loss, nn.Module) else loss
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return "labels", 2
    is_of_labels = any(x.name.lower() in ("labels", "label", "y", "target", "targets") for x in parameters)
    required = [
        x for x in parameters if x.default is x.empty and x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)
    ]
    is_any = any(x.kind is x.VAR_POSITIONAL for x in parameters)
    return "labels" if is_of_labels else "views", 2 if is_any else len(required) or 2


def _call_form(make_loss: Callable[[], Any]) -> tuple[tuple[Call, int] | None, str]:
    """Construct a loss on this rank; return its call form, or None, and the name of its type."""
    made = make_loss()
    return call_form(made) if callable(made) else None, type(made).__name__


class Examination:
    """Tests all invariants of one loss and stores the first counterexample of each."""

    def __init__(self, case: Case, worlds: Worlds, sizes: tuple[int, ...], width: int | None) -> None:
        self.case, self.worlds, self.world_sizes, self.width = case, worlds, sizes, width
        self.fewest = min([w for w in sizes if w > 1] or sizes)  # ranks of the smallest world of several
        self.batches = partial(global_batches, sizes, width=width)
        self.report = Report(case.name, sizes, case.grad_reduction)
        self.reference_error = ""  # why the last batch without a reference has none
        self.failures = 0  # number of batches on which a rank raised or hung
        self.broken: dict[str, Finding] = {}  # the first finding of each broken invariant
        self.is_patient = False  # whether ranks were given more time, as they are once
        self.averaged: set[GlobalBatch] = set()  # those on which the mean of many calls was compared

    def survey(self, max_examples: int) -> None:
        """Test four fixed batches for each W, then drawn ones; one drawn batch in five has adversarial samples."""
        width = self.width or DEFAULT_WIDTH
        # for each W > 1 uneven, empty and equal shards; one process and extremes last
        splits = [(uneven(w), (*[0] * (w - 1), 4), (3,) * w) if w > 1 else () for w in self.world_sizes]
        shards = [*chain(*splits), *((3,) for w in self.world_sizes if w == 1)]
        fixed = [GlobalBatch(x, d=width) for x in shards]
        fixed += [GlobalBatch((2,) * w, d=width, kind="huge") for w in self.world_sizes]
        for batch in fixed[:max_examples]:
            self._test(batch)
        remaining = max(0, max_examples - len(fixed))
        for kinds, share in ((ORDINARY, remaining - remaining // 5), (ADVERSARIAL, remaining // 5)):
            if share:
                drawn = given(batch=self.batches(kinds=kinds))(self._test)
                settings(SEARCH, max_examples=share, phases=[Phase.generate])(drawn)()
        if self.report.examples == 0:  # no batch has a reference
            raise ValueError(
                f"{self.case.name}: raises, or is not finite, on one process, so there is no reference to compare with. "
                f"It {self.case.called}. {self.reference_error}"
            )

    def _test(self, batch: GlobalBatch) -> None:
        unequal = len(set(batch.shards)) > 1
        if (self.failures and unequal) or self.failures == MOST_FAILURES:
            return
        trial = Trial(self.case, batch, self.worlds)
        if reason := trial.no_reference():
            self.reference_error = reason
            return
        self.report.examples += 1
        for invariant in invariants.STEP_INVARIANTS:
            untested = invariant.name not in self.broken or invariant is runs_on_every_split
            is_small = trial.world_size == self.fewest or invariant not in invariants.OF_BACKWARD
            finding = self._finding(invariant, trial) if untested and is_small and _applies(invariant, batch) else None
            if finding is not None:
                self.broken.setdefault(finding.invariant.name, finding)
                if finding.invariant is runs_on_every_split:
                    self.failures += 1
                    return  # every further invariant would wait for the same rank

    def train(self) -> None:
        """Test the training invariants once for each W, if no invariant of a single step is broken."""
        for world_size in () if self.broken else self.world_sizes:
            trial = Trial(self.case, GlobalBatch((3,) * world_size, d=self.width or DEFAULT_WIDTH), self.worlds)
            for invariant in () if trial.no_reference() else invariants.TRAINING_INVARIANTS:
                if invariant.name not in self.broken and (finding := self._finding(invariant, trial)):
                    self.broken[finding.invariant.name] = finding

    def shrunk(self, invariant: Invariant) -> Finding:
        """Return the finding of this invariant on the smallest batch found within the time limit."""
        best = self.broken[invariant.name]
        deadline = time.monotonic() + SHRINKING / len(self.broken)

        def fails(batch: GlobalBatch) -> bool:
            nonlocal best
            if time.monotonic() > deadline or not _applies(invariant, batch):
                return False
            trial = Trial(self.case, batch, self.worlds)
            result = None if trial.no_reference() else self._finding(invariant, trial)
            if result is None or result.invariant is not invariant:  # ranks that raise show nothing of a gradient
                return False
            best = min(best, result, key=lambda x: _size(x.batch))
            return True

        kinds = ADVERSARIAL if invariant is finite_at_extremes else ORDINARY[:1]
        with suppress(HypothesisException):  # the time limit ended the search: return the best
            find(self.batches(kinds=kinds), fails, settings=settings(SEARCH, max_examples=40))
        return best

    def _finding(self, invariant: Invariant, trial: Trial) -> Finding | None:
        try:
            shards = trial.batch.shards  # one process never differs from one process
            is_evidence = len({*shards} if invariant is runs_on_every_split else shards) > 1
            if invariant(trial) and is_evidence:
                self.report.tried.add(invariant.name)
        except (Broken, RankError) as error:
            if not self.is_patient and _may_be_slow(error):
                self.is_patient, self.worlds.timeout = True, FIRST_CALL_FACTOR * self.worlds.timeout
                return self._finding(invariant, Trial(self.case, trial.batch, self.worlds))
            if isinstance(error, RankError):
                return Finding(runs_on_every_split, invariants.first_line(error), trial.batch)
            return None if self._is_noise(invariant, trial) else Finding(invariant, str(error), trial.batch)
        return None

    def _is_noise(self, invariant: Invariant, trial: Trial) -> bool:
        """Return whether a broken invariant holds within the noise; of the training of a loss that draws, the contract."""
        if trial.draws and invariant in invariants.OF_SAME_DRAWS:
            return False
        if trial.draws and len(self.averaged | {trial.batch}) > MOST_AVERAGED:
            return True
        self.averaged |= {trial.batch} if trial.draws else set()
        import_module(COMPILER)
        try:
            noisy = trial.with_noise
            if noisy is None:
                return False
            for each in CONTRACT if trial.draws and invariant in invariants.TRAINING_INVARIANTS else (invariant,):
                each(noisy)
        except (Broken, RankError):
            return False
        self.report.notes = sorted({*self.report.notes, noisy.note})
        return True


def _may_be_slow(error: Broken | RankError) -> bool:
    """Return whether a time-out ended while a rank computed or imported: on a busy machine that is no hang."""
    timeout = error.__cause__ if isinstance(error, Broken) else error
    return isinstance(timeout, WorldTimeout) and any(x.collective is None for x in timeout.stuck.values())


def _applies(invariant: Invariant, batch: GlobalBatch) -> bool:
    """Return whether to test an invariant on a batch: adversarial samples have ties, where gradients are not defined."""
    return (batch.kind in ADVERSARIAL) == (invariant is finite_at_extremes)


def _size(batch: GlobalBatch) -> tuple[int, ...]:
    """Return a key by which batches are ordered from small and plain to large."""
    plain = (batch.labels == "mixed") + (batch.kind == "gaussian")
    return (len(batch.shards), batch.total, batch.d, -plain, batch.seed, *batch.shards)
