"""The evidence of a diagnosis: the probes of one loss, and interventions on its samples that are measured when needed."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from contrastive_zoo.testing import invariants
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.measurement import Call, Case, Edit, Plan, starting_parameters, whole_batch
from contrastive_zoo.testing.probe import Probe, Ratio, is_near, probe
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


class Evidence:
    """The measurements from which a mistake is inferred; the same in every run, whatever batches a check has drawn.

    Args:
        case: the loss.
        broken: names of the invariants that a check found broken.
        worlds: the process groups to run on.
        width: width of the embeddings.
        failing: a batch on which some rank failed.
    """

    def __init__(
        self, case: Case, broken: Sequence[str], worlds: Worlds, width: int, failing: GlobalBatch | None = None
    ) -> None:
        self.case, self.worlds, self.width, self.failing = case, worlds, width, failing
        self.broken = set(broken) - {invariants.runs_on_every_split.name}
        self.errors: dict[str, RankError] = {}
        even = [self._probe("even", shards) for shards in EVEN]
        self.even = [result for result in even if result is not None]
        self.uneven = None if "even" in self.errors else self._probe("uneven", UNEVEN)
        self.one_sided = None if "even" in self.errors else self._probe("empty", ONE_SIDED)

    def _probe(self, name: str, shards: tuple[int, ...]) -> Probe | None:
        try:
            return probe(self.case, GlobalBatch(shards, d=self.width, seed=7), self.worlds)
        except RankError as error:
            self.errors.setdefault(name, error)
            return None

    # --- failures -----------------------------------------------------------------------------------------------------

    @cached_property
    def failure(self) -> str | None:
        """Return how ranks fail on shards that are not equal, or on the failing batch; None if they do not."""
        error = self.errors.get("uneven") or self.errors.get("empty")
        if error is None and self.failing is not None:
            try:
                Trial(self.case, self.failing, self.worlds).on_ranks()
            except RankError as of_batch:
                error = of_batch
        if error is None:
            return None
        return "hang" if isinstance(error, WorldTimeout) else "uneven shards"

    @cached_property
    def starts_unequal(self) -> bool:
        """Return whether the loss's own parameters differ between ranks before the first step."""
        if self.even:
            return not all(result.equal_start for result in self.even)
        try:
            start = self.worlds.run(2, starting_parameters, self.case, GlobalBatch(EVEN[0], d=self.width, seed=7))
        except RankError:
            return False
        return any(result.keys() != start[0].keys() or not _equal(result, start[0]) for result in start)

    # --- gradients ----------------------------------------------------------------------------------------------------

    def every(self, holds: Callable[[Probe], bool]) -> bool:
        """Return whether a statement holds for every probe on equal shards."""
        return all(holds(result) for result in self.even)

    def is_scaled(self, encoder: Callable[[int], float], parameters: Callable[[int], float]) -> bool:
        """Return whether both gradients have these factors, functions of W, on equal shards."""
        return self.every(lambda x: x.is_scaled(encoder(x.world_size), parameters(x.world_size)))

    def passes_on(self, factor: Callable[[int], float]) -> bool:
        """Return whether the embeddings of a training step get ``factor`` times the right gradient; True if not known."""
        return self.every(lambda x: x.embeddings is None or x.embeddings.is_scaled(factor(x.world_size)))

    @property
    def has_parameters(self) -> bool:
        """Return whether the loss has parameters of its own."""
        return self.even[0].parameters is not None

    @property
    def option(self) -> str | None:
        """Return the option ``grad_reduction`` of the loss; None if it has none."""
        return self.even[0].measured.grad_reduction

    def calls(self, name: str) -> bool:
        """Return whether a collective of such a name is called in the forward pass."""
        return any(name in collective for collective in self.even[0].measured.collectives)

    @property
    def calls_in_backward(self) -> bool:
        """Return whether a collective of embeddings or gradients is called in the backward pass of the loss."""
        return bool(self.even[0].measured.backward_collectives)

    # --- interventions ------------------------------------------------------------------------------------------------

    @cached_property
    def selection(self) -> str | None:
        """Return the mistake that compares exactly the samples that every rank compares; None if there is none."""
        for mistake, selections in SELECTIONS[self.case.call].items():
            if self.every(lambda x, s=selections: any(self._computes(x, select) for select in s)):  # type: ignore[misc]  # a default
                return mistake
        return None

    def _computes(self, found: Probe, select: Callable[..., list[Any]]) -> bool:
        samples, shards, d = whole_batch(self.case, found.batch), found.batch.shards, found.batch.d
        return all(
            is_near(value_of(self.case, select(samples, shards, rank), d, self.worlds), value)
            for rank, value in enumerate(found.values)
        )

    def changes(self, edit: Edit) -> bool | None:
        """Return whether an edit changes the value of rank 0, or of the last rank for an edit of its shard.

        None if a rank fails, or if the value of one process does not change although it should.
        """
        try:
            for result in self.even:
                trial = Trial(self.case, result.batch, self.worlds)
                value = [x.value for x in trial.on_ranks(Plan(edit=edit))]
                rank = -1 if edit == "last shard reversed" else 0
                if not is_near(value[rank], result.values[rank]):
                    return True
                if edit.startswith("other") and is_near(trial.on_one_process(Plan(edit=edit)).value, result.expected):
                    return None
        except RankError:
            return None
        return False

    @cached_property
    def right_on_equal_samples(self) -> bool:
        """Return whether every value is right if all ranks hold the same samples."""
        plan = Plan(edit="equal shards")
        try:
            for result in self.even:
                trial = Trial(self.case, result.batch, self.worlds)
                expected = trial.on_one_process(plan).value
                if not all(is_near(x.value, expected) for x in trial.on_ranks(plan)):
                    return False
        except RankError:
            return False
        return True

    def signature(self) -> str:
        """Return what was measured, relative to one process."""
        probes = [*self.even, *(result for result in (self.uneven, self.one_sided) if result and not result.right)]
        return ". ".join(str(result) for result in probes) or "no probe returned a value on several processes"


def _equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return all(found[name].equal(expected[name]) for name in expected)


__all__ = ["EVEN", "ONE_SIDED", "UNEVEN", "Evidence", "Ratio"]
