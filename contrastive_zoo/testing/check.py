"""Check in one call whether a loss is the same function on any number of processes, and diagnose it if it is not."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest
from typing import Any, Literal, NamedTuple

try:
    from hypothesis import HealthCheck, Phase, find, given, settings
    from hypothesis.errors import HypothesisException, NoSuchExample
except ImportError as error:
    raise ImportError("contrastive_zoo.testing needs hypothesis: pip install 'contrastive_zoo[testing]'") from error
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import contrastive_zoo
from contrastive_zoo.ranks.one_process import HeldGroupError
from contrastive_zoo.testing import invariants, measurement
from contrastive_zoo.testing.batch import ADVERSARIAL, ORDINARY, GlobalBatch, global_batches
from contrastive_zoo.testing.evidence import CLOSE, Comparison, Evidence, Gradients, Ratio, Stage, flat, is_near
from contrastive_zoo.testing.interventions import SELECTIONS, Selection
from contrastive_zoo.testing.invariants import CONTRACT, Broken, Invariant, finite_at_extremes, runs_on_every_split
from contrastive_zoo.testing.measurement import Call, Case, GradReduction, Measurement, Plan, Trial
from contrastive_zoo.testing.mistakes import FALLBACK, diagnose
from contrastive_zoo.testing.report import Finding, NotInvariant, Report, require_world_sizes
from contrastive_zoo.testing.worlds import RankError, Worlds, WorldTimeout, is_user_code
from contrastive_zoo.wrapper.distributed import DistributedLoss

__all__ = ["Finding", "NotInvariant", "Report", "check_world_size_invariance", "examine"]
# Seconds for the loss's construction, which imports its modules, and for its first call, which may compile
FIRST_CALL_TIMEOUT = 120.0
SHORT_CALL = 2.0  # seconds of a first call that need no longer timeout
SHRINKING = 4.0  # time limit in seconds for shrinking all counterexamples of a check
MOST_FAILURES = 3  # the search stops after so many batches on which a rank raises or hangs: each may cost a timeout
MOST_AVERAGED = 2  # batches on which many calls of a loss with random numbers are compared, where a single one differs

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
    level: Literal["loss", "training_step"] = "loss",
    width: int | None = None,
    timeout: float = 4.0,
    worlds: Worlds | None = None,
    name: str | None = None,
    on_example: Callable[[int], None] = lambda count: None,
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
        timeout: seconds for one global batch. A first call that takes longer, as compilation does, is waited for, and lets
            later ones take as long.
        worlds: a pool of process groups to use, with its own timeout; None starts one.
        name: name of the loss in the report.
        on_example: called with the number of batches tested so far.

    Returns:
        The report of a loss that satisfies all invariants.

    Raises:
        NotInvariant: an invariant is broken; the message names the smallest batch found, the diagnosis and the fix.
        ValueError: the loss fails on one process, or a setting is unknown.

    Examples:
        >>> import contrastive_zoo as cz
        >>> report = check_world_size_invariance(
        ...     lambda: cz.DistributedLoss(cz.SupCon()), world_sizes=(1, 2), max_examples=3
        ... )
        >>> report.ok
        True
    """
    require_world_sizes(world_sizes)
    choices = {"call": (call, "auto", "labels", "views"), "grad_reduction": (grad_reduction, "mean", "sum")}
    for setting, (value, *allowed) in (choices | {"level": (level, "loss", "training_step")}).items():
        if value not in allowed:
            raise ValueError(f"{setting} is one of {', '.join(allowed)}, got {value!r}.")
    world_sizes = tuple(sorted(set(world_sizes)))
    start = time.monotonic()
    with ExitStack() as stack:
        pool = worlds or stack.enter_context(Worlds(timeout=timeout, grace=0.3))
        try:
            inferred, problem = pool.run(1, _call_form, make_loss, level, timeout=FIRST_CALL_TIMEOUT)[0]
        except RankError as error:
            raise ValueError(f"the loss cannot be constructed: {invariants.first_line(error)}") from error
        if inferred is None:
            raise ValueError(problem)
        pool.start(1, *world_sizes)
        first_call = time.monotonic()
        form = inferred if call == "auto" else call
        name = name or str(getattr(make_loss, "__name__", "loss"))
        case = Case(make_loss, form, grad_reduction, step=level == "training_step", name=name)
        with suppress(RankError):  # a loss that fails is reported below
            batch = GlobalBatch((4,), d=width or DEFAULT_WIDTH)
            pool.run(1, measurement.measure, case, (batch,), measurement.UNCHANGED, timeout=FIRST_CALL_TIMEOUT)
        stack.callback(setattr, pool, "timeout", pool.timeout)
        slow = max(0.0, time.monotonic() - first_call - SHORT_CALL)
        pool.timeout += 2 * max(world_sizes) * slow  # all ranks may compile at the same time
        examination = Examination(case, pool, world_sizes, width, on_example)
        examination.survey(max_examples)
        examination.train()
        broken, report = examination.broken, examination.report
        report.findings = [examination.shrunk(x) for x in invariants.INVARIANTS if x.name in broken]
        if report.findings:
            failing = next((x.batch for x in report.findings if x.invariant is runs_on_every_split), None)
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


def _call_form(make_loss: Callable[[], Any], level: str) -> tuple[Call | None, str]:
    """Construct a loss or a training step on this rank; return its call form, or None and the problem."""
    made = make_loss()
    if level == "training_step":
        if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1]):
            return measurement.call_form(made[1]), ""
        return None, f"at level training_step the function returns (model, step), got {type(made).__name__}."
    if callable(made):
        return measurement.call_form(made), ""
    hint = " For (model, step) pass level training_step." if isinstance(made, tuple) else ""
    hint = " It looks like a loss: pass a function that returns the loss." if isinstance(made, Tensor) else hint
    return None, f"the function returns a loss, which is callable, got {type(made).__name__}.{hint}"


class Examination:
    """Tests all invariants of one loss and stores the first counterexample of each."""

    def __init__(
        self, case: Case, worlds: Worlds, sizes: tuple[int, ...], width: int | None, on_example: Callable[[int], None]
    ) -> None:
        self.case, self.worlds, self.world_sizes, self.width, self.on_example = case, worlds, sizes, width, on_example
        self.batches = partial(global_batches, sizes, width=width)
        self.report = Report(case.name, sizes, case.grad_reduction)
        self.reference_error = ""  # why the last batch without a reference has none
        self.failures = 0  # number of batches on which a rank raised or hung
        self.broken: dict[str, Finding] = {}  # the first finding of each broken invariant
        self.averaged: set[GlobalBatch] = set()  # those on which the mean of many calls was compared

    def survey(self, max_examples: int) -> None:
        """Test four fixed batches for each W, then drawn ones; one drawn batch in five has adversarial samples."""
        width = self.width or DEFAULT_WIDTH
        # for each W > 1 uneven, empty and equal shards; one process and extremes last
        splits = [(tuple(range(1, w + 1)), (*[0] * (w - 1), 4), (3,) * w) if w > 1 else () for w in self.world_sizes]
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
                f"It was called with {'two views' if self.case.call == 'views' else 'embeddings and labels'}; pass "
                f"call='labels' or 'views' if that is wrong. {self.reference_error}"
            )

    def _test(self, batch: GlobalBatch) -> None:
        unequal = len(set(batch.shards)) > 1
        if (self.failures and unequal) or self.failures == MOST_FAILURES:
            return
        trial = Trial(self.case, batch, self.worlds)
        try:
            one = trial.on_one_process()
        except RankError as error:  # one process raises: there is no reference to compare with
            self.reference_error = str(error)
            return
        if batch.kind not in ADVERSARIAL and not one.is_finite:
            self.reference_error = f"Its value or a gradient is not finite at {batch}."
            return
        self.report.examples += 1
        self.on_example(self.report.examples)
        for invariant in invariants.STEP_INVARIANTS:
            untested = invariant.name not in self.broken or invariant is runs_on_every_split
            finding = self._finding(invariant, trial) if untested and _applies(invariant, batch) else None
            if finding is not None:
                self.broken.setdefault(finding.invariant.name, finding)
                if finding.invariant is runs_on_every_split:
                    self.failures += 1
                    return  # every further invariant would wait for the same rank

    def train(self) -> None:
        """Test the training invariants once for each W, if no invariant of a single step is broken."""
        for world_size in () if self.broken else self.world_sizes:
            trial = Trial(self.case, GlobalBatch((3,) * world_size, d=self.width or DEFAULT_WIDTH), self.worlds)
            for invariant in invariants.TRAINING_INVARIANTS:
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
            result = self._finding(invariant, Trial(self.case, batch, self.worlds))
            if result is not None and _size(batch) < _size(best.batch):
                best = result
            return result is not None

        kinds = ADVERSARIAL if invariant is finite_at_extremes else ORDINARY[:1]
        with suppress(NoSuchExample, HypothesisException):  # the time limit ended the search: return the best
            find(self.batches(kinds=kinds), fails, settings=settings(SEARCH, max_examples=40))
        return best

    def _finding(self, invariant: Invariant, trial: Trial) -> Finding | None:
        try:
            shards = trial.batch.shards  # one process never differs from one process
            is_evidence = len({*shards} if invariant is runs_on_every_split else shards) > 1
            if invariant(trial) and is_evidence:
                self.report.tried.add(invariant.name)
        except Broken as broken:
            return None if self._is_noise(invariant, trial) else Finding(invariant, str(broken), trial.batch)
        except RankError as error:
            return Finding(runs_on_every_split, invariants.first_line(error), trial.batch)
        return None

    def _is_noise(self, invariant: Invariant, trial: Trial) -> bool:
        """Return whether a broken invariant holds within the noise; of the training of a loss that draws, the contract."""
        if trial.draws and invariant in invariants.OF_SAME_DRAWS:
            return False
        if trial.draws and len(self.averaged | {trial.batch}) > MOST_AVERAGED:
            return True
        self.averaged |= {trial.batch} if trial.draws else set()
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


def _applies(invariant: Invariant, batch: GlobalBatch) -> bool:
    """Return whether to test an invariant on a batch: adversarial samples have ties, where gradients are not defined."""
    return (batch.kind in ADVERSARIAL) == (invariant is finite_at_extremes)


def _size(batch: GlobalBatch) -> tuple[int, ...]:
    """Return a key by which batches are ordered from small and plain to large."""
    plain = (batch.labels == "mixed") + (batch.kind == "gaussian")
    return (len(batch.shards), batch.total, batch.d, -plain, batch.seed, *batch.shards)


# Shards of the probes: equal, unequal, and all samples on the last rank
EVEN, UNEVEN, ONE_SIDED = ((3, 3), (2, 2, 2)), (2, 4), (0, 4)


class LossEvidence(Evidence):
    """The evidence of a loss or a training step; the same in every run, whatever batches a check has drawn.

    A check names the broken invariants, and gives a batch on which some rank failed.
    """

    def __init__(
        self, case: Case, broken: Sequence[str], worlds: Worlds, *, width: int = 3, failing: GlobalBatch | None = None
    ) -> None:
        self.case, self.worlds, self.width, self.tolerance = case, worlds, width, measurement.TOLERANCE
        self.is_step, self.trainer = case.step, case.grad_reduction
        self.broken = frozenset(broken) - {runs_on_every_split.name}
        self.measured: Measurement | None = None  # by rank 0 on the first batch
        self._trials: dict[tuple[int, ...], Trial] = {}
        try:
            trial = self._trial(EVEN[0])
            if not trial.draws and trial.with_noise is not None:
                self.tolerance = trial.with_noise.tolerance
            self.comparisons = [self._compared(shards) for shards in EVEN]
            self.uneven = self._compared(UNEVEN)
            self.one_sided = self._compared(ONE_SIDED)
        except RankError as error:
            self.failure = self._kind(error)
        if self.measured is not None:
            self.option = self.measured.grad_reduction
            self.calls_in_backward = not case.step and any(x.is_of_floats for x in self.measured.backward)
            self.draws = self.measured.random_operations
        self.stages = self._stages(failing)

    @property
    def close(self) -> float:
        return max(CLOSE, self.tolerance)

    def _trial(self, shards: tuple[int, ...]) -> Trial:
        batch = GlobalBatch(shards, d=self.width, seed=7)
        return self._trials.setdefault(shards, Trial(self.case, batch, self.worlds))

    def _compared(self, shards: tuple[int, ...]) -> Comparison:
        """Compare one batch with one process; a RankError says that a rank raised, died or never answered."""
        trial = self._trial(shards)
        one, ranks = trial.on_one_process(), trial.on_ranks(Plan(record=True))
        self.measured = self.measured or ranks[0]

        def gradients(of: str) -> Gradients | None:
            expected, by_rank = getattr(one, of), [getattr(x, of) for x in ranks]
            if not expected:
                return None
            by_rank = by_rank if self.is_step else [trial.reduce(by_rank)]
            names = [name for name in expected if all(name in x for x in by_rank)]
            return Gradients.between([flat(x, names) for x in by_rank], flat(expected, names), self.close)

        embeddings, lengths = None, [[len(y) for y in x.embeddings] for x in (one, *ranks)]
        if one.embeddings and all(len(x) == len(lengths[0]) for x in lengths):
            by_input = zip(*(x.embeddings for x in ranks), strict=True)
            of_ranks = torch.cat([x.flatten() for each in by_input for x in each])
            embeddings = Ratio.between(of_ranks, torch.cat([x.flatten() for x in one.embeddings]))
        return Comparison(
            values=torch.tensor([[x.value] for x in ranks], dtype=torch.float64),
            expected=torch.tensor([one.value], dtype=torch.float64),
            encoder=gradients("encoder"),
            parameters=gradients("parameters"),
            embeddings=embeddings,
            equal_parameters=_are_equal([x.parameters for x in ranks]),
            gathered=bool(one.embeddings) and all(x == lengths[0] for x in lengths),
            tolerance=self.close,
            shards=shards,
        )

    def _stages(self, failing: GlobalBatch | None) -> list[Stage]:
        with suppress(RankError):  # the loss's own parameters, before the first step
            if not _are_equal(
                self.worlds.run(2, measurement.starting_parameters, self.case, self._trial(EVEN[0]).batch)
            ):
                return ["start"]
        if not self.comparisons:
            return ["failure"]
        if not self.every(lambda x: x.has_values(1.0)):
            return ["value"]
        if not self.every(lambda x: x.is_scaled(1.0, 1.0)):
            return ["gradient"]
        if self.uneven is not None and not (self.uneven.has_values(1.0) and self.uneven.is_scaled(1, 1)):
            return ["uneven"]
        if not self.every(lambda x: x.equal_parameters):
            return ["gradient"]
        if self.failure is None and failing is not None:
            try:
                Trial(self.case, failing, self.worlds).on_ranks()
            except RankError as error:
                self.failure = self._kind(error)
        if self.failure is not None:
            return ["failure"]
        return [] if self.broken & {invariant.name for invariant in CONTRACT} else ["other"]

    def _kind(self, error: RankError) -> str:
        if isinstance(error, WorldTimeout):
            return "hang"
        if any(isinstance(x, HeldGroupError) for x in error.errors.values()):
            return FALLBACK
        return "uneven shards" if self.comparisons else "raises"

    def calls(self, name: str) -> bool:
        return self.measured is not None and any(name in x.name for x in self.measured.forward if x.is_of_floats)

    @property
    def _probed(self) -> Sequence[Comparison]:
        """The batches on which a wrong value shows."""
        return [self.uneven] if self.stages == ["uneven"] and self.uneven is not None else self.comparisons

    def confirms(self, mistake: str) -> bool:
        if mistake == FALLBACK:
            if self.option is not None or self.is_step or not self.calls(""):
                return False
            make = self.case.make
            wrapped = replace(self.case, make=lambda: DistributedLoss(make()))
            return LossEvidence(wrapped, (), self.worlds, width=self.width).stages == ["other"]  # the contract holds
        if mistake == "state":
            return self._remembers
        if mistake == {"labels": "views split wrongly", "views": "labels not gathered"}[self.case.call]:
            return False
        if all(any(self._computes(x, y) for y in SELECTIONS.get(mistake, ())) for x in self.comparisons):
            return True
        is_of_labels = mistake == "labels not gathered"
        return is_of_labels and self.changes("other samples") is True and self.changes("other labels") is False

    def _computes(self, comparison: Comparison, select: Selection) -> bool:
        """Return whether each rank returns the loss of the samples that it selects, or all the mean over ranks of these."""
        batch = self._trial(comparison.shards).batch
        whole, ranks = measurement.whole_batch(self.case, batch), range(comparison.world_size)
        selected = (select(whole, [*batch.shards], rank) for rank in ranks)
        local = [measurement.value_of(self.case, samples, batch.d, self.worlds) for samples in selected]
        values, mean = [float(x) for x in comparison.values], sum(local) / len(local)
        return all(map(self._near, values, local)) or all(self._near(x, mean) for x in values)

    def _near(self, x: float, y: float) -> bool:
        return is_near(x, y, self.close)

    def changes(self, edit: str) -> bool | None:
        """Return whether an edit changes the value of rank 0, or of the last rank for an edit of its shard.

        None if a rank fails, or if the value of one process does not change although it should.
        """
        plan, rank = Plan(edit=edit), -1 if edit == "last shard reversed" else 0
        try:
            for x in self._probed:
                trial = self._trial(x.shards)
                if not self._near(trial.on_ranks(plan)[rank].value, float(x.values[rank])):
                    return True
                if edit.startswith("other") and self._near(trial.on_one_process(plan).value, float(x.expected)):
                    return None
        except RankError:
            return None
        return False

    def right_after(self, edit: str) -> bool:
        plan, trials = Plan(edit=edit), [self._trial(x.shards) for x in self.comparisons]
        with suppress(RankError):
            return all(self._near(y.value, x.on_one_process(plan).value) for x in trials for y in x.on_ranks(plan))
        return False

    @property
    def _remembers(self) -> bool:
        """Return whether the value of a step on one process depends on the samples of the step before."""
        batch, whole = self._trial(EVEN[0]).batch, Plan(whole=True)
        steps = ((replace(batch, seed=seed), batch) for seed in (1, 2))
        first, second = (self.worlds.run(1, measurement.measure, self.case, x, whole)[0][-1] for x in steps)
        return not (isinstance(first, str) or isinstance(second, str) or self._near(first.value, second.value))

    def place(self) -> str:
        shown = self._probed or self.comparisons
        return parting(self._trial(shown[0].shards)) if shown else ""


def _are_equal(by_rank: Sequence[dict[str, Tensor]]) -> bool:
    first, *others = by_rank
    return all(x.keys() == first.keys() and all(torch.allclose(x[name], first[name]) for name in first) for x in others)


DIGITS = 9  # significant digits in which a number is the same
_FOLDERS = ("ranks", "engine", "loss_base", "losses", "wrapper")
_LIBRARY = tuple(os.path.join(contrastive_zoo.__path__[0], folder) for folder in _FOLDERS)
Lines = frozenset[tuple[str, ...]]


class Made(NamedTuple):
    """A tensor of a forward pass: where it was made, its rows, and its columns."""

    place: str
    rows: Lines
    columns: Lines


class Trace(TorchDispatchMode):
    """Records the floating tensors that operations inside the context return."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Made] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        if func.namespace == "aten" and not name.startswith(("empty", "new_empty", "detach", "lift")):
            for x in tree_leaves(result):
                if isinstance(x, Tensor) and x.is_floating_point() and x.numel() and (where := _place()):
                    rows = x.detach().reshape(len(x) if x.ndim > 1 else x.numel(), -1).tolist()
                    rounded = [tuple(f"{number:.{DIGITS}g}" for number in row) for row in rows]
                    place = f"{where}: {name} of shape {list(x.shape)}"
                    self.made.append(Made(place, frozenset(rounded), frozenset(zip(*rounded, strict=True))))
        return result


def _place() -> str:
    """Return module, file, line and function of the user's code that calls an operation."""
    frame: Any = sys._getframe(2)
    while frame is not None and not is_user_code(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_LIBRARY):
        return ""  # of this library, not of the loss under test
    owner = frame.f_locals.get("self")
    module = f" of {type(owner).__name__}" if isinstance(owner, torch.nn.Module) else ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}{module}"


def trace(case: Case, batch: GlobalBatch, whole: bool) -> list[Made]:
    subject = measurement.Subject(case, batch.d)
    arguments = subject.model.embed(measurement.local_shard(case, batch, Plan(whole=whole)))
    with Trace() as recorded:
        subject.loss(*arguments)
    return recorded.made


def parting(trial: Trial) -> str:
    """Return where the first rank parts from one process, in words; empty if it does not, or fails."""
    if trial.case.step:
        return ""
    try:
        (alone,) = trial.worlds.run(1, trace, trial.case, trial.batch, True)
        by_rank = trial.worlds.run(trial.world_size, trace, trial.case, trial.batch, False)
    except RankError:
        return ""
    lines = Lines().union(*(x.rows | x.columns for x in alone))
    for of_ranks in zip_longest(*by_rank):
        for rank, made in enumerate(of_ranks):
            if made is not None and not (made.rows <= lines or made.columns <= lines):
                return f"first on rank {rank} at {made.place}, of which one process computes no part"
    return ""
