"""The evidence of a check: fixed global batches on W ranks, and interventions on their samples, measured when needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property

import torch
from torch import Tensor

from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.evidence import Comparison, Evidence, Gradients, Ratio, Stage, is_near
from contrastive_zoo.testing.invariants import CONTRACT, runs_on_every_split
from contrastive_zoo.testing.measurement import Call, Case, Edit, Measurement, Plan, starting_parameters, whole_batch
from contrastive_zoo.testing.measurement import Gradients as Tensors
from contrastive_zoo.testing.trial import Trial, value_of
from contrastive_zoo.testing.worlds import RankError, Worlds, WorldTimeout

Selection = Callable[[list[Tensor], Sequence[int], int], list[Tensor]]
"""A function of the samples of all ranks (one tensor per view, or samples and labels), the shard sizes and a rank."""


def local_samples(samples: list[Tensor], shards: Sequence[int], rank: int) -> list[Tensor]:
    """Return the samples of one rank."""
    return [x.split(list(shards))[rank] for x in samples]


def local_rank_first(samples: list[Tensor], shards: Sequence[int], rank: int) -> list[Tensor]:
    """Return all samples, those of one rank first."""
    order = [rank, *(other for other in range(len(shards)) if other != rank)]
    return [torch.cat([x.split(list(shards))[r] for r in order]) for x in samples]


def local_labels(samples: list[Tensor], shards: Sequence[int], rank: int) -> list[Tensor]:
    """Return all samples, with the labels of one rank repeated."""
    x, labels = samples
    return [x, labels.split(list(shards))[rank].repeat(len(shards))]


def blocks_as_views(samples: list[Tensor], shards: Sequence[int], rank: int) -> list[Tensor]:
    """Return views that are split from one tensor of the ranks' blocks: P N P N read as P P N N."""
    split = (x.split(list(shards)) for x in samples)
    blocks = torch.cat([block for of_rank in zip(*split, strict=True) for block in of_rank])
    return list(blocks.chunk(len(samples)))


def interleaved(samples: list[Tensor], shards: Sequence[int], rank: int) -> list[Tensor]:
    """Return the views with the samples of all but the first interleaved over ranks."""
    local_index = [index for n in shards for index in range(n)]
    order = torch.tensor(sorted(range(len(local_index)), key=lambda sample: local_index[sample]))
    return [samples[0], *(x[order] for x in samples[1:])]


SELECTIONS: dict[Call, dict[str, tuple[Selection, ...]]] = {
    "labels": {
        "local negatives": (local_samples,),
        "own rank first": (local_rank_first,),
        "labels not gathered": (local_labels,),
    },
    "views": {
        "local negatives": (local_samples,),
        "own rank first": (local_rank_first,),
        "views split wrongly": (blocks_as_views, interleaved),
    },
}
"""By call form: the mistakes that compare the wrong samples, and the selections that they amount to."""


EVEN, UNEVEN, ONE_SIDED = ((3, 3), (2, 2, 2)), (2, 4), (0, 4)
"""Shards of the probes: equal, unequal, and all samples on the last rank."""


class LossEvidence(Evidence):
    """The evidence of a loss or a training step; the same in every run, whatever batches a check has drawn.

    Args:
        case: the loss or the training step.
        broken: names of the invariants that a check found broken.
        worlds: the process groups to run on.
        width: width of the embeddings.
        failing: a batch on which some rank failed.
    """

    def __init__(
        self, case: Case, broken: Sequence[str], worlds: Worlds, *, width: int = 3, failing: GlobalBatch | None = None
    ) -> None:
        self.case, self.worlds, self.width, self.failing = case, worlds, width, failing
        self.is_step, self.trainer = case.step, case.grad_reduction
        self.broken = frozenset(broken) - {runs_on_every_split.name}
        self.ranks: list[list[Measurement]] = []
        try:
            self.comparisons = [self._compared(shards) for shards in EVEN]
            self.uneven = self._compared(UNEVEN)
            self.one_sided = self._compared(ONE_SIDED)
        except RankError as error:
            self.failure = self._kind(error)
        self.measured = self.ranks[0][0] if self.ranks else None
        if self.measured is not None:
            self.option = self.measured.grad_reduction
            self.calls_in_backward = bool(self.measured.backward_collectives)
        self.stages = self._stages()

    def _batch(self, shards: tuple[int, ...]) -> GlobalBatch:
        return GlobalBatch(shards, d=self.width, seed=7)

    def _compared(self, shards: tuple[int, ...]) -> Comparison:
        """Compare one batch with one process.

        Raises:
            RankError: a rank raised, died or never answered.
        """
        trial, plan = Trial(self.case, self._batch(shards), self.worlds), Plan(record_collectives=True)
        one, ranks = trial.on_one_process(), trial.on_ranks(plan)
        self.ranks.append(ranks)

        def gradients(of: str) -> Gradients | None:
            expected, by_rank = getattr(one, of), [getattr(x, of) for x in ranks]
            if not expected:
                return None
            by_rank = by_rank if self.is_step else [trial.reduce(by_rank)]
            names = set.intersection(*map(set, by_rank))
            mean = {name: torch.stack([x[name] for x in by_rank]).mean(0) for name in expected if name in names}
            return Gradients(tuple(compare(x, expected) for x in by_rank), compare(mean, expected))

        return Comparison(
            values=torch.tensor([[x.value] for x in ranks], dtype=torch.float64),
            expected=torch.tensor([one.value], dtype=torch.float64),
            encoder=gradients("encoder"),
            parameters=gradients("parameters"),
            embeddings=_compare_embeddings(ranks, one),
            equal_parameters=_are_equal([x.parameters for x in ranks]),
            gathered=bool(one.embeddings) and all(_lengths(x) == _lengths(one) for x in ranks),
            shards=shards,
        )

    def _stages(self) -> list[Stage]:
        """Return where the loss goes wrong first."""
        if self._starts_unequal():
            return ["start"]
        if not self.comparisons:
            return ["failure"]
        if not self.every(lambda x: x.has_values(1.0)):
            return ["value"]
        if not self.is_scaled("1", "1"):
            return ["gradient"]
        if self.uneven is not None and not (self.uneven.has_values(1.0) and self.uneven.is_scaled(1, 1)):
            return ["uneven"]
        if not self.every(lambda x: x.equal_parameters):
            return ["gradient"]
        self.failure = self.failure or self._failure_of_the_check()
        if self.failure is not None:
            return ["failure"]
        return [] if self.broken & {invariant.name for invariant in CONTRACT} else ["other"]

    def _failure_of_the_check(self) -> str | None:
        try:
            if self.failing is not None:
                Trial(self.case, self.failing, self.worlds).on_ranks()
        except RankError as error:
            return self._kind(error)
        return None

    def _kind(self, error: RankError) -> str:
        if isinstance(error, WorldTimeout):
            return "hang"
        return "uneven shards" if self.comparisons else "raises"

    def _starts_unequal(self) -> bool:
        """Return whether the loss's own parameters differ between ranks before the first step."""
        starts = [[x.start for x in ranks] for ranks in self.ranks]
        if not starts:
            with suppress(RankError):
                starts = [self.worlds.run(2, starting_parameters, self.case, self._batch(EVEN[0]))]
        return not all(map(_are_equal, starts))

    def calls(self, name: str) -> bool:
        return self.measured is not None and any(name in collective for collective in self.measured.collectives)

    # --- interventions ------------------------------------------------------------------------------------------------

    @cached_property
    def selection(self) -> str | None:
        for mistake, selections in SELECTIONS[self.case.call].items():
            if self.every(lambda x, s=selections: any(self._computes(x, select) for select in s)):  # type: ignore[misc]  # a default
                return mistake
        return None

    def _computes(self, found: Comparison, select: Selection) -> bool:
        batch = self._batch(found.shards)
        samples = whole_batch(self.case, batch)
        return all(
            is_near(value_of(self.case, select(samples, batch.shards, rank), batch.d, self.worlds), float(value))
            for rank, value in enumerate(found.values)
        )

    @property
    def lacks_labels(self) -> bool:
        return (
            self.case.call == "labels"
            and self._changes("other samples") is True
            and self._changes("other labels") is False
        )

    @property
    def lacks_offset(self) -> bool:
        return (
            not self.every(lambda x: x.equal_values)
            and self._right_on_equal_samples
            and self._changes("other samples") is True
            and self._changes("last shard reversed") is True
        )

    @property
    def uses_positions(self) -> bool:
        return (
            self.case.call == "views"
            and self._changes("last shard reversed") is True
            and self._changes("all shards reversed") is False
            and not self._right_on_equal_samples
        )

    def _changes(self, edit: Edit) -> bool | None:
        """Return whether an edit changes the value of rank 0, or of the last rank for an edit of its shard.

        None if a rank fails, or if the value of one process does not change although it should.
        """
        plan = Plan(edit=edit)
        try:
            for result in self.comparisons:
                trial = Trial(self.case, self._batch(result.shards), self.worlds)
                rank = -1 if edit == "last shard reversed" else 0
                if not is_near(trial.on_ranks(plan)[rank].value, float(result.values[rank])):
                    return True
                if edit.startswith("other") and is_near(trial.on_one_process(plan).value, float(result.expected)):
                    return None
        except RankError:
            return None
        return False

    @cached_property
    def _right_on_equal_samples(self) -> bool:
        plan = Plan(edit="equal shards")
        try:
            for result in self.comparisons:
                trial = Trial(self.case, self._batch(result.shards), self.worlds)
                expected = trial.on_one_process(plan).value
                if not all(is_near(x.value, expected) for x in trial.on_ranks(plan)):
                    return False
        except RankError:
            return False
        return True


def compare(found: Tensors, expected: Tensors) -> Ratio:
    """Compare two gradients by name of the parameter.

    Examples:
        >>> compare({"w": torch.tensor([2.0, 0.0])}, {"w": torch.tensor([1.0, 0.0])}).ratio
        2.0
    """
    return _ratio([found[name] for name in expected if name in found], list(expected.values()))


def _ratio(found: Sequence[Tensor], expected: Sequence[Tensor]) -> Ratio:
    x, y = (torch.cat([part.double().flatten() for part in parts]) for parts in (found, expected))
    if x.shape != y.shape:
        return Ratio(math.nan, math.nan, math.nan)
    return Ratio.between(x, y) if y.norm() > 0 else Ratio(1.0, 1.0, 0.0)


def _compare_embeddings(ranks: Sequence[Measurement], one: Measurement) -> Ratio | None:
    if not one.embeddings or any(len(result.embeddings) != len(one.embeddings) for result in ranks):
        return None
    by_input = zip(*(result.embeddings for result in ranks), strict=True)
    return _ratio([x for shards in by_input for x in shards], one.embeddings)


def _lengths(found: Measurement) -> list[int]:
    return [len(x) for x in found.embeddings]


def _are_equal(by_rank: Sequence[Tensors]) -> bool:
    first, *others = by_rank
    return all(
        result.keys() == first.keys() and all(torch.allclose(result[name], first[name]) for name in first)
        for result in others
    )
