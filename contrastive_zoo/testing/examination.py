"""The search of a check: test every invariant on many global batches, then shrink each counterexample."""

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

try:
    from hypothesis import HealthCheck, Phase, find, given, settings
    from hypothesis.errors import HypothesisException, NoSuchExample
except ImportError as error:
    raise ImportError("contrastive_zoo.testing needs hypothesis: pip install 'contrastive_zoo[testing]'") from error


from contrastive_zoo.testing import invariants
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.invariant import Broken, Invariant
from contrastive_zoo.testing.invariants import STEP_INVARIANTS, TRAINING_INVARIANTS
from contrastive_zoo.testing.measurement import Case
from contrastive_zoo.testing.report import Finding
from contrastive_zoo.testing.strategies import ADVERSARIAL, ORDINARY, global_batches
from contrastive_zoo.testing.trial import Trial
from contrastive_zoo.testing.worlds import RankError, Worlds

SHRINKING = 4.0
"""Time limit in seconds for shrinking all counterexamples of a check."""

MOST_FAILURES = 3
"""The search stops after so many batches on which a rank raises or hangs: each may cost a timeout."""

SEARCH = settings(deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
"""The settings of every search: the same batches in every run."""

DEFAULT_WIDTH = 3
"""Width of the embeddings in fixed batches, where the loss does not fix it."""


class Examination:
    """Tests all invariants of one loss and stores the first counterexample of each."""

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
        self.batches = partial(global_batches, world_sizes, width=width)
        self.reference_error: RankError | None = None
        self.failures = 0  # number of batches on which a rank raised or hung
        self.examples = 0  # number of global batches tested
        self.broken: dict[str, Finding] = {}  # the first finding of each broken invariant
        self.tried: set[str] = set()  # the invariants that applied to at least one batch

    def survey(self, max_examples: int) -> None:
        """Test four fixed batches for each W, then drawn ones; one drawn batch in five has adversarial samples.

        Raises:
            ValueError: the loss raises on one process for every batch.
        """
        fixed = _fixed_batches(self.world_sizes, self.width or DEFAULT_WIDTH)
        for batch in fixed[:max_examples]:
            self._test(batch)
        remaining = max(0, max_examples - len(fixed))
        for kinds, share in ((ORDINARY, remaining - remaining // 5), (ADVERSARIAL, remaining // 5)):
            if share:
                drawn = given(batch=self.batches(kinds=kinds))(self._test)
                settings(SEARCH, max_examples=share, phases=[Phase.generate])(drawn)()
        if self.examples == 0:  # no batch has a reference
            raise ValueError(
                f"{self.case.name}: raises on one process, so there is no reference to compare with. "
                f"It was called with {'two views' if self.case.call == 'views' else 'embeddings and labels'}; pass "
                f"call='labels' or 'views' if that is wrong. {self.reference_error}"
            )

    def _test(self, batch: GlobalBatch) -> None:
        unequal = len(set(batch.shards)) > 1
        if (self.failures and unequal) or self.failures == MOST_FAILURES:
            return
        trial = Trial(self.case, batch, self.worlds)
        try:
            trial.on_one_process()
        except RankError as error:  # one process raises: there is no reference to compare with
            self.reference_error = error
            return
        self.examples += 1
        self.on_example(self.examples)
        for invariant in STEP_INVARIANTS:
            untested = invariant.name not in self.broken or invariant is invariants.runs_on_every_split
            finding = self._finding(invariant, trial) if untested and _applies(invariant, batch) else None
            if finding is not None:
                self.broken.setdefault(finding.invariant.name, finding)
                if finding.invariant is invariants.runs_on_every_split:
                    self.failures += 1
                    return  # every further invariant would wait for the same rank

    def train(self) -> None:
        """Test the training invariants once for each W, if no invariant of a single step is broken."""
        for world_size in () if self.broken else self.world_sizes:
            trial = Trial(self.case, GlobalBatch((3,) * world_size, d=self.width or DEFAULT_WIDTH), self.worlds)
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
            result = self._finding(invariant, Trial(self.case, batch, self.worlds))
            if result is not None and _size(batch) < _size(best.batch):
                best = result
            return result is not None

        kinds = ADVERSARIAL if invariant is invariants.finite_at_extremes else ORDINARY[:1]
        with suppress(NoSuchExample, HypothesisException):  # the time limit ended the search: return the best
            find(self.batches(kinds=kinds), fails, settings=settings(SEARCH, max_examples=40))
        return best

    def _finding(self, invariant: Invariant, trial: Trial) -> Finding | None:
        try:
            if invariant(trial) and _is_evidence(invariant, trial.batch):
                self.tried.add(invariant.name)
        except Broken as broken:
            return Finding(invariant, str(broken), trial.batch)
        except RankError as error:
            return Finding(invariants.runs_on_every_split, str(error).partition("\n")[0], trial.batch)
        return None


def _fixed_batches(world_sizes: tuple[int, ...], width: int) -> list[GlobalBatch]:
    """Return the fixed batches of a survey: for each W > 1 uneven, empty and equal shards; one process and extremes last."""
    splits: list[tuple[int, ...]] = []
    for size in world_sizes:
        if size > 1:
            splits += [tuple(range(1, size + 1)), (*[0] * (size - 1), 4), (3,) * size]
    splits += [(3,) for size in world_sizes if size == 1]
    extremes = [GlobalBatch((2,) * size, d=width, kind="huge") for size in world_sizes]
    return [*(GlobalBatch(shards, d=width) for shards in splits), *extremes]


def _is_evidence(invariant: Invariant, batch: GlobalBatch) -> bool:
    """Return whether a batch on which an invariant holds says that it does: one process never differs from one process."""
    if invariant is invariants.runs_on_every_split:
        return len(set(batch.shards)) > 1
    return len(batch.shards) > 1


def _applies(invariant: Invariant, batch: GlobalBatch) -> bool:
    """Return whether to test an invariant on a batch: adversarial samples have ties, where gradients are not defined."""
    return (batch.kind in ADVERSARIAL) == (invariant is invariants.finite_at_extremes)


def _size(batch: GlobalBatch) -> tuple[int, ...]:
    """Return a key by which batches are ordered from small and plain to large."""
    plain = (batch.labels == "mixed") + (batch.kind == "gaussian")
    return (len(batch.shards), batch.total, batch.d, -plain, batch.seed, *batch.shards)
