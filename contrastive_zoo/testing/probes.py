"""The evidence of a check: fixed global batches on W ranks, and interventions on their samples, measured when needed."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.evidence import Comparison, Evidence, Gradients, Ratio, Stage, is_near
from contrastive_zoo.testing.invariants import CONTRACT, runs_on_every_split
from contrastive_zoo.testing.measurement import Call, Case, Edit, Measurement, Plan, starting_parameters, whole_batch
from contrastive_zoo.testing.measurement import Gradients as Tensors
from contrastive_zoo.testing.trial import Trial, value_of
from contrastive_zoo.testing.worlds import RankError, Worlds, WorldTimeout
from contrastive_zoo.wrapper.distributed import DistributedLoss

Selection = Callable[[list[Tensor], list[int], int], list[Tensor]]
"""A function of the samples of all ranks (one tensor per view, or samples and labels), the shard sizes and a rank."""


def local_samples(samples: list[Tensor], shards: list[int], rank: int) -> list[Tensor]:
    return [x.split(shards)[rank] for x in samples]


def local_rank_first(samples: list[Tensor], shards: list[int], rank: int) -> list[Tensor]:
    """Return all samples, those of one rank first."""
    order = [rank, *(other for other in range(len(shards)) if other != rank)]
    return [torch.cat([x.split(shards)[r] for r in order]) for x in samples]


def local_labels(samples: list[Tensor], shards: list[int], rank: int) -> list[Tensor]:
    """Return all samples, with the labels of one rank repeated."""
    x, labels = samples
    return [x, labels.split(shards)[rank].repeat(len(shards))]


def blocks_as_views(samples: list[Tensor], shards: list[int], rank: int) -> list[Tensor]:
    """Return views that are split from one tensor of the ranks' blocks: P N P N read as P P N N."""
    by_rank = zip(*(x.split(shards) for x in samples), strict=True)
    blocks = torch.cat([block for of_rank in by_rank for block in of_rank])
    return list(blocks.chunk(len(samples)))


def interleaved(samples: list[Tensor], shards: list[int], rank: int) -> list[Tensor]:
    """Return the views with the samples of all but the first interleaved over ranks."""
    local_index = torch.cat([torch.arange(n) for n in shards])
    order = local_index.argsort(stable=True)
    return [samples[0], *(x[order] for x in samples[1:])]


_OF_ANY_LOSS: dict[str, tuple[Selection, ...]] = {
    "local negatives": (local_samples,),
    "own rank first": (local_rank_first,),
}
SELECTIONS: dict[Call, dict[str, tuple[Selection, ...]]] = {
    "labels": _OF_ANY_LOSS | {"labels not gathered": (local_labels,)},
    "views": _OF_ANY_LOSS | {"views split wrongly": (blocks_as_views, interleaved)},
}
"""By call form: the mistakes that compare the wrong samples, and the selections that they amount to."""

EVEN, UNEVEN, ONE_SIDED = ((3, 3), (2, 2, 2)), (2, 4), (0, 4)
"""Shards of the probes: equal, unequal, and all samples on the last rank."""


class LossEvidence(Evidence):
    """The evidence of a loss or a training step; the same in every run, whatever batches a check has drawn.

    A check names the broken invariants, and gives a batch on which some rank failed.
    """

    def __init__(
        self, case: Case, broken: Sequence[str], worlds: Worlds, *, width: int = 3, failing: GlobalBatch | None = None
    ) -> None:
        self.case, self.worlds, self.width = case, worlds, width
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
        self.stages = self._stages(failing)

    def _trial(self, shards: tuple[int, ...]) -> Trial:
        return Trial(self.case, GlobalBatch(shards, d=self.width, seed=7), self.worlds)

    def _compared(self, shards: tuple[int, ...]) -> Comparison:
        """Compare one batch with one process; a RankError says that a rank raised, died or never answered."""
        trial = self._trial(shards)
        one, ranks = trial.on_one_process(), trial.on_ranks(Plan(record_collectives=True))
        self.ranks.append(ranks)

        def gradients(of: str) -> Gradients | None:
            expected, by_rank = getattr(one, of), [getattr(x, of) for x in ranks]
            if not expected:
                return None
            by_rank = by_rank if self.is_step else [trial.reduce(by_rank)]
            names = set.intersection(*map(set, by_rank))
            mean = {name: torch.stack([x[name] for x in by_rank]).mean(0) for name in expected if name in names}
            return Gradients(tuple(compare(x, expected) for x in by_rank), compare(mean, expected))

        embeddings, lengths = None, [[len(y) for y in x.embeddings] for x in (one, *ranks)]
        if one.embeddings and all(len(x) == len(lengths[0]) for x in lengths):
            by_input = zip(*(x.embeddings for x in ranks), strict=True)
            embeddings = _ratio([x for of_ranks in by_input for x in of_ranks], one.embeddings)
        return Comparison(
            values=torch.tensor([[x.value] for x in ranks], dtype=torch.float64),
            expected=torch.tensor([one.value], dtype=torch.float64),
            encoder=gradients("encoder"),
            parameters=gradients("parameters"),
            embeddings=embeddings,
            equal_parameters=_are_equal([x.parameters for x in ranks]),
            gathered=bool(one.embeddings) and all(x == lengths[0] for x in lengths),
            shards=shards,
        )

    def _stages(self, failing: GlobalBatch | None) -> list[Stage]:
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
        if "by a process group that it holds" in str(error):  # refused by DistributedLoss
            return "gathers by itself"
        return "uneven shards" if self.comparisons else "raises"

    def _starts_unequal(self) -> bool:
        """Return whether the loss's own parameters differ between ranks before the first step."""
        starts = [[x.start for x in ranks] for ranks in self.ranks]
        if not starts:
            with suppress(RankError):
                starts = [self.worlds.run(2, starting_parameters, self.case, self._trial(EVEN[0]).batch)]
        return not all(map(_are_equal, starts))

    def calls(self, name: str) -> bool:
        return self.measured is not None and any(name in collective for collective in self.measured.collectives)

    # --- interventions ------------------------------------------------------------------------------------------------

    def confirms(self, mistake: str) -> bool:
        selections = SELECTIONS[self.case.call].get(mistake, ())
        if selections and all(any(self._computes(x, select) for select in selections) for x in self.comparisons):
            return True
        if mistake == "gathers by itself":  # whatever it does, DistributedLoss makes it right
            return self.option is None and not self.is_step and self.calls("") and self._is_right_when_wrapped
        if mistake == "labels not gathered":
            is_labelled = self.case.call == "labels"
            return is_labelled and self._changes("other samples") is True and self._changes("other labels") is False
        if mistake == "result thrown away":  # ranks communicate, and the value does not depend on other ranks
            return self.calls("reduce") and self._changes("other samples") is False
        if mistake == "local normalisation":  # it hides a shift of other ranks' samples, and nothing else
            return self._changes("other samples") is True and self._changes("other samples shifted") is False
        if mistake == "mask without offset":  # ranks take their own index for the global one
            return (
                not self.every(lambda x: x.equal_values)
                and self._right_on_equal_samples
                and self._changes("other samples") is True
                and self._changes("last shard reversed") is True
            )
        return (
            mistake == "labels by position"
            and self.case.call == "views"
            and self._changes("last shard reversed") is True
            and self._changes("all shards reversed") is False
            and not self._right_on_equal_samples
        )

    @property
    def _is_right_when_wrapped(self) -> bool:
        wrapped = replace(self.case, make=partial(_wrapped, self.case.make))
        return LossEvidence(wrapped, (), self.worlds, width=self.width).stages == ["other"]  # the contract holds

    def _computes(self, comparison: Comparison, select: Selection) -> bool:
        batch = self._trial(comparison.shards).batch
        samples, shards = whole_batch(self.case, batch), list(batch.shards)
        return all(
            is_near(value_of(self.case, select(samples, shards, rank), batch.d, self.worlds), float(value))
            for rank, value in enumerate(comparison.values)
        )

    def _changes(self, edit: Edit) -> bool | None:
        """Return whether an edit changes the value of rank 0, or of the last rank for an edit of its shard.

        None if a rank fails, or if the value of one process does not change although it should.
        """
        plan, rank = Plan(edit=edit), -1 if edit == "last shard reversed" else 0
        try:
            for x in self.comparisons:
                trial = self._trial(x.shards)
                if not is_near(trial.on_ranks(plan)[rank].value, float(x.values[rank])):
                    return True
                if edit.startswith("other") and is_near(trial.on_one_process(plan).value, float(x.expected)):
                    return None
        except RankError:
            return None
        return False

    @cached_property
    def _right_on_equal_samples(self) -> bool:
        plan = Plan(edit="equal shards")
        try:
            for x in self.comparisons:
                trial = self._trial(x.shards)
                expected = trial.on_one_process(plan).value
                if not all(is_near(rank.value, expected) for rank in trial.on_ranks(plan)):
                    return False
        except RankError:
            return False
        return True


def _wrapped(make: Callable[[], Any]) -> DistributedLoss:
    return DistributedLoss(make())


def compare(gradients: Tensors, expected: Tensors) -> Ratio:
    return _ratio([gradients[name] for name in expected if name in gradients], list(expected.values()))


def _ratio(tensors: Sequence[Tensor], expected: Sequence[Tensor]) -> Ratio:
    x, y = (torch.cat([part.double().flatten() for part in parts]) for parts in (tensors, expected))
    if x.shape != y.shape:
        return Ratio(math.nan, math.nan, math.nan)
    return Ratio.between(x, y) if y.norm() > 0 else Ratio(1.0, 1.0, 0.0)


def _are_equal(by_rank: Sequence[Tensors]) -> bool:
    first, *others = by_rank
    return all(x.keys() == first.keys() and all(torch.allclose(x[name], first[name]) for name in first) for x in others)
