"""One call that says whether a loss is the same function on any number of processes, and if not, what is wrong."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis.errors import HypothesisException, NoSuchExample

from contrastive_zoo.testing import laws
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.diagnosis import Diagnosis, diagnose
from contrastive_zoo.testing.laws import LAWS, OF_ONE_STEP, OF_TRAININGS, Broken, Law
from contrastive_zoo.testing.measurement import Call, Case, GradReduction, call_form
from contrastive_zoo.testing.strategies import ADVERSARIAL, ORDINARY, global_batches
from contrastive_zoo.testing.trial import Trial
from contrastive_zoo.testing.worlds import RankError, Worlds

SHRINKING = 4.0
"""Seconds spent on making a counterexample small."""

MOST_FAILURES = 3
"""Batches on which ranks raise or hang, after which no more are tried."""

IMPORTING = 120.0
"""Seconds that the ranks may take to make the loss for the first time, importing what it needs."""


@dataclass
class Finding:
    """A law that does not hold, on the smallest batch found.

    Args:
        law: which.
        message: what came and what was expected.
        batch: where.
    """

    law: Law
    message: str
    batch: GlobalBatch


@dataclass
class Report:
    """What an examination found.

    Args:
        name: of the loss.
        world_sizes: the W tried.
        grad_reduction: what the trainer was taken to do.
        examples: global batches tried.
        findings: one for each law that does not hold, the most basic first.
        diagnosis: what is wrong and how to mend it; None if nothing is.
        seconds: how long it took.
    """

    name: str
    world_sizes: tuple[int, ...]
    grad_reduction: GradReduction
    examples: int = 0
    findings: list[Finding] = field(default_factory=list)
    diagnosis: Diagnosis | None = None
    seconds: float = 0.0
    tried: frozenset[str] = frozenset()
    """Names of the laws that said something of some batch."""

    def holds(self, law: Law) -> bool | None:
        """Whether a law held on every batch; None if it was not tried."""
        if any(found.law is law for found in self.findings):
            return False
        return True if law.name in self.tried else None

    @property
    def ok(self) -> bool:
        """Whether every law that was tried held on every batch."""
        return not self.findings

    def __str__(self) -> str:
        trainer = f"a trainer that {'averages' if self.grad_reduction == 'mean' else 'sums'} gradients"
        where = f"W = {', '.join(map(str, self.world_sizes))}, {self.examples} global batches, {trainer}"
        if self.ok:
            return f"{self.name} is the same function on any number of processes ({where})."
        lines = [f"{self.name} is not the same function on any number of processes ({where})."]
        lines += [
            f"  {found.law}: {found.message}\n      at {found.batch}   # {found.batch!r}" for found in self.findings
        ]
        return "\n".join([*lines, f"Diagnosis: {self.diagnosis}"])

    def as_dict(self) -> dict[str, Any]:
        """The report in plain types, for JSON."""
        broken = {found.law.name: found for found in self.findings}
        return {
            "loss": self.name,
            "ok": self.ok,
            "world_sizes": list(self.world_sizes),
            "grad_reduction": self.grad_reduction,
            "examples": self.examples,
            "seconds": round(self.seconds, 2),
            "laws": {
                law.name: {"holds": False, "message": broken[law.name].message, "batch": repr(broken[law.name].batch)}
                if law.name in broken
                else {"holds": self.holds(law)}
                for law in LAWS
            },
            "diagnosis": None
            if self.diagnosis is None
            else {"mistake": self.diagnosis.mistake, "why": self.diagnosis.why, "mend": self.diagnosis.mend},
        }


class NotInvariant(AssertionError):  # noqa: N818
    """A loss depends on the number of processes; ``report`` says how."""

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

    Global batches are drawn with even, uneven and empty shards and with labels of all kinds; each is computed by one
    process and by W real ones, and every law of :mod:`contrastive_zoo.testing.laws` is held against the results. At the
    level of a training step nothing is done for you: gathering inside the model, hooks and scaling are under test too.

    Args:
        make_loss: returns the loss, a module or function of this rank's rows; run on every rank, in its process group.
            At level ``"training_step"`` returns ``(model, step)``; ``step(model, *rows)`` takes features [n, 3] (and
            labels), runs forward, backward and whatever reduces gradients, leaves them in ``.grad`` and returns the loss.
        world_sizes: the W to try.
        call: ``"labels"`` for ``loss(embeddings, labels)``, ``"views"`` for ``loss(view1, view2)``; ``"auto"`` goes by
            the names of the loss's parameters.
        grad_reduction: what the trainer does with gradients.
        max_examples: how many global batches to try.
        level: what is under test.
        width: of the embeddings, where the loss fixes it (proxies, class weights); labels are below 64.
        worlds: live worlds to use; None starts some.
        name: what the report calls the loss.

    Returns:
        The report of a loss that holds all laws.

    Raises:
        NotInvariant: a law does not hold; the message has the smallest batch found, the diagnosis and the mend.
        ValueError: the loss does not work on one process either, or a setting is unknown.

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
    """:func:`check_world_size_invariance` that returns its report whatever it says.

    Args:
        on_example: called with the number of batches tried so far.

    Raises:
        ValueError: the loss does not work on one process either, or a setting is unknown.

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
        findings = [examination.shrunk(law) for law in LAWS if law.name in examination.broken]
        report = Report(case.name, tuple(world_sizes), grad_reduction, examination.examples, findings)
        report.tried = frozenset(examination.tried)
        if findings:
            report.diagnosis = diagnose(case, [found.law.name for found in findings], pool, width=width or 3)
    report.seconds = time.monotonic() - start
    return report


class _Examination:
    """All laws on many batches; the first failure of each law is kept, then made smaller."""

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
        """Telling batches for each W first, then drawn ones, every fifth with adversarial rows."""
        width = self.width or 3
        telling = [GlobalBatch((3,) * world_size, d=width) for world_size in self.world_sizes]
        telling += [GlobalBatch(tuple(range(1, world_size + 1)), d=width) for world_size in self.world_sizes]
        telling += [GlobalBatch((2,) * world_size, d=width, rows="huge") for world_size in self.world_sizes]
        for batch in telling[:max_examples]:
            self._try(batch)
        left = max(0, max_examples - len(telling))
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
                f"{self.case.name}: raises on one process already, so that there is nothing to compare with. "
                f"It was called with {'two views' if self.case.call == 'views' else 'embeddings and labels'}; say "
                f"call='labels' or 'views' if that is wrong. {self.unusable}"
            )

    def _try_drawn(self, batch: GlobalBatch) -> None:
        self._try(batch)

    def _try(self, batch: GlobalBatch) -> None:
        unequal = len(set(batch.shards)) > 1
        if (self.failures and unequal) or self.failures == MOST_FAILURES:
            return  # it does not run there, and each time may cost a time-out
        trial = Trial(self.case, batch, self.worlds)
        try:
            trial.alone()
        except RankError as error:  # no loss of one process to compare with
            self.unusable = error
            return
        self.examples += 1
        self.on_example(self.examples)
        for law in OF_ONE_STEP:
            if (law.name not in self.broken or law is laws.runs_on_every_split) and _asked(law, batch):
                finding = self._finding(law, trial)
                if finding is not None:
                    self.broken.setdefault(finding.law.name, finding)
                if finding is not None and finding.law is laws.runs_on_every_split:
                    self.failures += 1
                    return  # every further law would wait for the same rank

    def train(self) -> None:
        """Laws of several steps, once for each W: what is wrong with one step is to be put right before."""
        for world_size in () if self.broken else self.world_sizes:
            trial = Trial(self.case, GlobalBatch((3,) * world_size, d=self.width or 3), self.worlds)
            for law in OF_TRAININGS:
                finding = None if law.name in self.broken else self._finding(law, trial)
                if finding is not None:
                    self.broken[finding.law.name] = finding

    def shrunk(self, law: Law) -> Finding:
        """The finding of this law on the smallest batch found in a few seconds."""
        best = self.broken[law.name]
        deadline = time.monotonic() + SHRINKING / len(self.broken)

        def fails(batch: GlobalBatch) -> bool:
            nonlocal best
            if time.monotonic() > deadline or not _asked(law, batch):
                return False
            found = self._finding(law, Trial(self.case, batch, self.worlds))
            if found is not None and _size(batch) < _size(best.batch):
                best = found
            return found is not None

        rows = ADVERSARIAL if law is laws.finite_at_extremes else ORDINARY[:1]
        quiet = settings(
            max_examples=40, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
        )
        with suppress(NoSuchExample, HypothesisException):  # time ran out in the middle of a search: best stands
            find(self.batches(rows=rows), fails, settings=quiet)
        return best

    def _finding(self, law: Law, trial: Trial) -> Finding | None:
        try:
            if law(trial):
                self.tried.add(law.name)
        except Broken as broken:
            return Finding(law, str(broken), trial.batch)
        except RankError as error:
            return Finding(laws.runs_on_every_split, str(error).partition("\n")[0], trial.batch)
        return None


def _asked(law: Law, batch: GlobalBatch) -> bool:
    """Adversarial rows lie on kinks, where gradients are not defined: only finiteness is asked there."""
    return (batch.rows in ADVERSARIAL) == (law is laws.finite_at_extremes)


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
