"""The evidence of a loss: probes on a few batches."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from contrastive_zoo.testing import measurement
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.evidence import CLOSE, Comparison, Evidence, Gradients, Stage, flat, is_near
from contrastive_zoo.testing.interventions import SELECTIONS, Selection
from contrastive_zoo.testing.invariants import CONTRACT, runs_on_every_split
from contrastive_zoo.testing.measurement import UNCHANGED, Case, Measurement, Plan, Trial
from contrastive_zoo.testing.stacks import NO_COLLECTIVE
from contrastive_zoo.testing.worlds import RankError, Worlds, WorldTimeout

# Shards of the probes: equal, unequal, and all samples on the last rank
EVEN, UNEVEN, ONE_SIDED = ((3, 3), (2, 2, 2)), (2, 4), (0, 4)


class LossEvidence(Evidence):
    """The evidence of a loss; the same in every run, whatever batches a check has drawn."""

    def __init__(
        self, case: Case, broken: Sequence[str], worlds: Worlds, *, width: int = 3, failing: GlobalBatch | None = None
    ) -> None:
        self.case, self.worlds, self.width, self.close = case, worlds, width, CLOSE
        self.trainer = case.grad_reduction
        self.broken = frozenset(broken) - {runs_on_every_split.name}
        self.measured: Measurement | None = None  # by rank 0 on the first batch
        self._trials: dict[tuple[int, ...], Trial] = {}
        try:
            trial = self._trial(EVEN[0])
            if not trial.draws and trial.with_noise is not None:
                self.close = max(CLOSE, trial.with_noise.tolerance)
            self.comparisons = [self._compared(shards) for shards in EVEN]
            self.uneven = self._compared(UNEVEN)
            self.one_sided = self._compared(ONE_SIDED)
        except RankError as error:
            if not any(x.no_reference() for x in self._trials.values()):
                self.failure = self._kind(error)
        if self.measured is not None:
            self.option = self.measured.grad_reduction
            self.calls_in_backward = any(x.is_of_floats for x in self.measured.backward)
            self.draws = self.measured.random_operations
        self.stages = self._stages(failing)

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
            reduced = trial.reduce(by_rank)
            names = [name for name in expected if name in reduced]
            return Gradients.between([flat(reduced, names)], flat(expected, names), self.close)

        return Comparison(
            values=torch.tensor([[x.value] for x in ranks], dtype=torch.float64),
            expected=torch.tensor([one.value], dtype=torch.float64),
            encoder=gradients("encoder"),
            parameters=gradients("parameters"),
            equal_parameters=_are_equal([x.parameters for x in ranks]),
            tolerance=self.close,
            shards=shards,
        )

    def _stages(self, failing: GlobalBatch | None) -> list[Stage]:
        with suppress(RankError):
            starts = zip(*self.worlds.run(2, measurement.starting_tensors, self.case, self.width), strict=True)
            self.equal_parameters, self.equal_tensors = map(_are_equal, starts)
            if not (self.equal_parameters and self.equal_tensors):
                return ["start"]
        if self.failure is not None and not self.comparisons:
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
            return "no answer" if NO_COLLECTIVE in str(error) else "hang"
        return "uneven shards" if self.comparisons else "raises"

    def calls(self, name: str) -> bool:
        return self.measured is not None and any(name in x.name for x in self.measured.forward if x.is_of_floats)

    @property
    def _probed(self) -> Sequence[Comparison]:
        """The batches on which a wrong value shows."""
        return [self.uneven] if self.stages == ["uneven"] and self.uneven is not None else self.comparisons

    def confirms(self, mistake: str) -> bool:
        if mistake == "state":  # the value of a step on one process depends on the samples of the step before
            batch = self._trial(EVEN[0]).batch
            steps = ((replace(batch, seed=seed), batch) for seed in (1, 2))
            first, second = (self.worlds.run(1, measurement.measure, self.case, x, UNCHANGED)[0][-1] for x in steps)
            return not (isinstance(first, str) or isinstance(second, str) or self._near(first.value, second.value))
        if mistake == {"labels": "views split wrongly", "views": "labels not gathered"}[self.case.call]:
            return False
        return all(any(self._computes(x, y) for y in SELECTIONS.get(mistake, ())) for x in self._probed)

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
        """Return whether an edit changes a rank's value; None if a rank fails, or if one process does not see the edit."""
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


def _are_equal(by_rank: Sequence[dict[str, Tensor]]) -> bool:
    first, *others = by_rank
    return all(x.keys() == first.keys() and all(torch.allclose(x[name], first[name]) for name in first) for x in others)
