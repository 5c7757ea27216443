"""Which rows of one rank are relevant to a query: by equal labels, or by judgements of pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.metrics.rounds import Round
from contrastive_zoo.ranks.world import World


class Pairs(NamedTuple):
    """Relevant pairs, ordered by query."""

    query: Int[Tensor, " p"]
    """The query within the round."""
    position: Int[Tensor, " p"]
    """The row of this rank's gallery."""
    grade: Float[Tensor, " p"]
    """How relevant it is; larger than 0."""


class Question(NamedTuple):
    """What a rank needs to know about the queries of a round."""

    labels: Int[Tensor, " g"]
    """Their labels; empty with judgements."""
    judged: Pairs
    """Judged rows of this rank, those with a grade above 0; empty with labels."""
    excluded: Int[Tensor, "g e"]
    """Rows of this rank that a query must not find; −1 for none."""


@dataclass(frozen=True)
class Labels:
    """Relevant is what has the label of the query, with grade 1.

    Args:
        queries: labels of this rank's queries.
        gallery: labels of this rank's rows.
        own: for each of this rank's queries, its own index in the gallery of all ranks; None if it is not there.
        start: the index of this rank's first row in the gallery of all ranks.
    """

    queries: Int[Tensor, " n"]
    gallery: Int[Tensor, " m"]
    own: Int[Tensor, " n"] | None
    start: int

    def question(self, block: Round) -> Question:
        """Gather the labels of a round."""
        labels = block.gathered(self.queries)
        excluded = torch.empty(len(labels), 0, dtype=torch.int64)
        if self.own is not None:
            excluded = local_positions(block.gathered(self.own), self.start, len(self.gallery))[:, None]
        nothing = torch.empty(0, dtype=torch.int64)
        return Question(labels, Pairs(nothing, nothing, nothing.double()), excluded)

    def values(self, question: Question, query: Tensor, position: Tensor) -> Int[Tensor, " p"]:
        """Return the labels of rows."""
        return self.gallery[position]

    def grades(self, block: Round, query: Tensor, values: Tensor) -> Float[Tensor, " p"]:
        """Return the grades of rows with these values, for local queries of the round."""
        return (self.queries[block.local][query] == values).double()

    def pairs(self, question: Question) -> Pairs:
        """Return all relevant pairs of a round with this rank's rows."""
        by_label, order = self.gallery.sort(stable=True)
        first, last = (torch.searchsorted(by_label, question.labels, right=right) for right in (False, True))
        query, offset = expanded(last - first)
        position = order[first[query] + offset]
        kept = (position[:, None] != question.excluded[query]).all(1)
        return Pairs(query[kept], position[kept], torch.ones(int(kept.sum()), dtype=torch.float64))

    def totals(self, question: Question) -> tuple[Tensor, Tensor, Tensor]:
        """Return how many rows of which grade are relevant: query, grade and count."""
        by_label = self.gallery.sort().values
        first, last = (torch.searchsorted(by_label, question.labels, right=right) for right in (False, True))
        excluded = question.excluded
        same = self.gallery[excluded.clamp(min=0)] == question.labels[:, None] if len(self.gallery) else excluded >= 0
        count = last - first - (same & (excluded >= 0)).sum(1)
        query = torch.arange(len(count))
        return query, torch.ones(len(count), dtype=torch.float64), count


@dataclass(frozen=True)
class Judgements:
    """Relevant is what has been judged with a grade above 0; what has a grade below 0 is ignored for the query.

    Args:
        query: for each judgement of this rank, the local query, in ascending order.
        item: the id of the judged row, on any rank.
        grade: how relevant it is.
        gallery_ids: ids of this rank's rows.
        world: the ranks.
        caller: the first word of errors.
    """

    query: Int[Tensor, " j"]
    item: Int[Tensor, " j"]
    grade: Float[Tensor, " j"]
    gallery_ids: Int[Tensor, " m"]
    world: World
    caller: str

    def question(self, block: Round) -> Question:
        """Gather the judgements of a round, and find those of this rank's rows.

        Raises:
            ValueError: on every rank alike, if an item is in no rank's gallery.
        """
        begin, end = torch.searchsorted(self.query, torch.tensor([block.local.start, block.local.stop])).tolist()
        query = self.query[begin:end] - block.local.start + block.shards.start
        query, item, grade = (block.gathered_unevenly(x) for x in (query, self.item[begin:end], self.grade[begin:end]))
        by_id, order = self.gallery_ids.sort()
        place = torch.searchsorted(by_id, item).clamp(max=max(0, len(by_id) - 1))
        here = by_id[place] == item if len(by_id) else torch.zeros(len(item), dtype=torch.bool)
        missing = len(item) - sum(x[0] for x in self.world.exchange([int(here.sum())]))
        if missing:
            raise ValueError(
                f"{self.caller}: {missing} of {len(item)} judgements name items that are in no rank's gallery_ids. "
                "Remove them, or add the rows."
            )
        query, position, grade = query[here], order[place[here]], grade[here]
        ignored = grade < 0
        excluded = rectangle(query[ignored], position[ignored], block.shards.total)
        kept = grade > 0
        return Question(torch.empty(0, dtype=torch.int64), Pairs(query[kept], position[kept], grade[kept]), excluded)

    def values(self, question: Question, query: Tensor, position: Tensor) -> Int[Tensor, " p"]:
        """Return the grades of rows, as the bits of float64."""
        judged, rows = question.judged, max(1, len(self.gallery_ids))
        keys, order = (judged.query * rows + judged.position).sort()
        wanted = query * rows + position
        place = torch.searchsorted(keys, wanted).clamp(max=max(0, len(keys) - 1))
        grades = torch.zeros(len(wanted), dtype=torch.float64)
        if len(keys):
            grades = torch.where(keys[place] == wanted, judged.grade[order][place], grades)
        return grades.view(torch.int64)

    def grades(self, block: Round, query: Tensor, values: Tensor) -> Float[Tensor, " p"]:
        """Return the grades of rows with these values."""
        return values.view(torch.float64)

    def pairs(self, question: Question) -> Pairs:
        """Return all relevant pairs of a round with this rank's rows."""
        return question.judged

    def totals(self, question: Question) -> tuple[Tensor, Tensor, Tensor]:
        """Return how many rows of which grade are relevant: query, grade and count."""
        judged = question.judged
        return judged.query, judged.grade, torch.ones_like(judged.query)


def local_positions(indices: Tensor, start: int, size: int) -> Tensor:
    """Return positions in this rank's rows, given indices in the gallery of all ranks; −1 for rows of other ranks."""
    positions = indices - start
    return positions.masked_fill((positions < 0) | (positions >= size), -1)


def expanded(counts: Int[Tensor, " n"]) -> tuple[Int[Tensor, " p"], Int[Tensor, " p"]]:
    """Return for each of Σ counts places whose it is, and its number among them.

    Examples:
        >>> expanded(torch.tensor([2, 0, 1]))
        (tensor([0, 0, 2]), tensor([0, 1, 0]))
    """
    owner = torch.repeat_interleave(counts)
    return owner, torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]


def rectangle(query: Tensor, position: Tensor, queries: int) -> Int[Tensor, "g e"]:
    """Return the positions of each query as a row, padded with −1; ``query`` is in ascending order.

    Examples:
        >>> rectangle(torch.tensor([0, 0, 2]), torch.tensor([5, 6, 7]), 3).tolist()
        [[5, 6], [-1, -1], [7, -1]]
    """
    counts = torch.bincount(query, minlength=queries)
    owner, column = expanded(counts)
    rows = torch.full((queries, int(counts.max()) if queries else 0), -1)
    rows[owner, column] = position
    return rows
