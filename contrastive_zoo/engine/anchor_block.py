"""Define what a row-wise loss sees of the global batch: a block of local anchors and the candidates of all ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from contrastive_zoo import devices
from contrastive_zoo.derivations import unchanged
from contrastive_zoo.engine.class_pairs import class_numbers_as_floats
from contrastive_zoo.engine.row_statistics import Rows
from contrastive_zoo.later import read_later
from contrastive_zoo.world import Shards, World


@dataclass(frozen=True)
class AnchorBlock:
    """Hold c of this rank's anchors, the N candidates of all ranks, and which candidates are positives and negatives."""

    anchors: Float[Tensor, "c d"]
    candidates: Float[Tensor, "N d"]
    positive: Bool[Tensor, "c N"]
    """Whether the candidate has the anchor's id, and is not the anchor itself."""
    negative: Bool[Tensor, "c N"]
    """Whether the candidate has another id."""
    ids: Int[Tensor, " c"]
    """The ids of the anchors."""
    candidate_ids: Int[Tensor, " N"]
    companions: tuple[tuple[Tensor, Tensor], ...] = ()
    """Further data without gradient, each for anchors and for candidates, such as a guide's embeddings."""
    largest_count: Callable[[], int] | None = None
    """What :func:`start_count` returns, for losses that list positives."""

    @property
    def most_positives(self) -> int | None:
        """A number that no anchor's positives exceed; None if each block is to count its own."""
        return None if self.largest_count is None else self.largest_count()


BlockFunction = Callable[[AnchorBlock], "tuple[Tensor, Tensor] | Rows"]
"""A function that returns for the anchors of a block (loss [c], whether or how many times the anchor counts [c]).

It may yield statistics of the rows first (:mod:`contrastive_zoo.engine.row_statistics`), to see candidates in parts.

Row i of the result depends on anchor i only. A loss whose mean is taken over pairs or triplets returns its anchors' sums
and their numbers of pairs. A loss that adds several means returns them as columns, [c, k] both, and declares k in the
attribute ``terms``.
"""


def start_count(
    ids: Int[Tensor, " n"], candidate_ids: Int[Tensor, " N"], *, anchors_are_candidates: bool
) -> Callable[[], int] | None:
    """Start to copy the largest number of positives of an anchor from an accelerator; the function waits for it, once.

    None for ids on a CPU, where the positives of each block are counted without waiting.

    Examples:
        >>> ids = torch.tensor([7, 7, 8])
        >>> start_count(ids, ids, anchors_are_candidates=True) is None
        True
    """
    if devices.on_cpu(ids):
        return None
    if not len(ids) or not len(candidate_ids):  # there is no largest of no numbers
        return lambda: 0
    ordered = candidate_ids.sort().values
    ends, starts = (torch.searchsorted(ordered, ids, right=right) for right in (True, False))
    read = read_later((ends - starts).amax() - int(anchors_are_candidates))
    return cache(lambda: int(read()[0]))


@dataclass(frozen=True)
class BatchLayout:
    """Hold the ids of local anchors and of all candidates, from which each block's positives and negatives follow."""

    ids: Tensor
    candidate_ids: Tensor
    companions: tuple[tuple[Tensor, Tensor], ...]
    candidate_shards: Shards
    world: World
    first_own_candidate: int | None
    """The candidate that is the first local anchor, where anchors are candidates too."""
    own_candidates: Tensor | None
    """The candidate that is a copy of each local anchor, −1 for none."""
    restore: Callable[[Tensor], Tensor] = unchanged
    """Computes candidates from the rows that a ring sends in their place."""
    largest_count: Callable[[], int] | None = None
    """What :func:`start_count` returns, for losses that list positives."""

    @cached_property
    def _ids_as_floats(self) -> tuple[Tensor, Tensor]:
        """The ids of anchors and candidates, renumbered 0, 1, … so that floats represent them exactly."""
        numbers = class_numbers_as_floats(torch.cat([self.ids, self.candidate_ids]))
        return numbers[: len(self.ids)], numbers[len(self.ids) :]

    def _same_id(self, rows: slice) -> Tensor:
        if not devices.on_cpu(self.ids):
            return self.ids[rows, None] == self.candidate_ids
        # a CPU vectorises comparisons of floats into floats, and compares into booleans element by element
        anchors, candidates = self._ids_as_floats
        return torch.eq(
            anchors[rows, None], candidates, out=anchors.new_empty(len(anchors[rows]), len(candidates))
        ).bool()

    def copies_of(self, rows: slice) -> Tensor | None:
        """Return the candidate that is a copy of each of some anchors, −1 for none; None if no anchor has one."""
        if self.own_candidates is not None:
            return self.own_candidates[rows]
        if self.first_own_candidate is None:
            return None
        first = self.first_own_candidate
        return torch.arange(first + rows.start, first + rows.stop, device=self.ids.device)

    def block(self, rows: slice, anchors: Tensor, candidates: Tensor) -> AnchorBlock:
        """Return the block of some local anchors."""
        ids = self.ids[rows]
        positive = self._same_id(rows)
        negative = ~positive
        if self.first_own_candidate is not None:
            positive.diagonal(self.first_own_candidate + rows.start).fill_(False)
        if self.own_candidates is not None:
            index = torch.arange(positive.shape[1], device=positive.device)
            positive &= self.own_candidates[rows, None] != index
        companions = tuple((of_anchors[rows], of_candidates) for of_anchors, of_candidates in self.companions)
        return AnchorBlock(
            anchors, candidates, positive, negative, ids, self.candidate_ids, companions, self.largest_count
        )
