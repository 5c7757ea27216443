"""One round of an evaluation: what is relevant to its queries, by labels or judgements, and the ranking of each query.

Ranks answer for their own part of the gallery; the owners of the queries build the rankings.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.metrics.local_search import Gallery
from contrastive_zoo.metrics.ranking import Graded, Groups, Ints, Ranking, changes, levels_of, parts_of
from contrastive_zoo.metrics.rounds import Round, ask, exchanged, local_positions
from contrastive_zoo.ranks.world import World

_QUERIES = 256  # queries that are compared with a block of items at once where every score is needed


class Pairs(NamedTuple):
    """Relevant pairs, ordered by query: the query within the round, the item of this rank's gallery, and a grade above 0."""

    query: Int[Tensor, " p"]
    position: Int[Tensor, " p"]
    grade: Float[Tensor, " p"]


class Question(NamedTuple):
    """What a rank needs to know about the queries of a round."""

    labels: Int[Tensor, " g"]  # their labels; empty with judgements
    judged: Pairs  # judged items of this rank, those with a grade above 0; empty with labels
    excluded: Int[Tensor, "g e"]  # items of this rank that a query must not find; −1 for none


@dataclass(frozen=True)
class Labels:
    """Relevant is what has the label of the query, with grade 1."""

    queries: Int[Tensor, " n"]
    gallery: Int[Tensor, " m"]
    positions: Int[Tensor, " n"] | None
    """For each of this rank's queries, its own index in the gallery of all ranks; None if it is not there."""
    start: int  # the index of this rank's first item in the gallery of all ranks

    def question(self, block: Round) -> Question:
        labels = block.gathered(self.queries)
        excluded = torch.empty(len(labels), 0, dtype=torch.int64)
        if self.positions is not None:
            excluded = local_positions(block.gathered(self.positions), self.start, len(self.gallery))[:, None]
        nothing = torch.empty(0, dtype=torch.int64)
        return Question(labels, Pairs(nothing, nothing, nothing.double()), excluded)

    def labels(self, block: Round) -> Ints:
        return self.queries[block.local].numpy()

    def values(self, question: Question, query: Tensor, position: Tensor) -> Int[Tensor, " p"]:
        return self.gallery[position]

    def grades(self, block: Round, query: Tensor, values: Tensor) -> Float[Tensor, " p"]:
        """Return the grades of items with these values, for local queries of the round."""
        return (self.queries[block.local][query] == values).double()

    def pairs(self, question: Question) -> Pairs:
        by_label, order = self.gallery.sort(stable=True)
        first, count = _occurrences(by_label, question.labels)
        query, offset = expanded(count)
        position = order[first[query] + offset]
        kept = (position[:, None] != question.excluded[query]).all(1)
        return Pairs(query[kept], position[kept], torch.ones(int(kept.sum()), dtype=torch.float64))

    def totals(self, world: World) -> Graded:
        """Return how many items are relevant to each query: rank ``label mod W`` counts those of a label."""
        at_home: list[Tensor] = []

        def keep(labels: Tensor) -> Tensor:
            at_home.append(labels.sort().values)
            return labels

        ask(self.gallery.remainder(world.size), self.gallery, keep, world)
        counts = ask(self.queries.remainder(world.size), self.queries, lambda x: _occurrences(at_home[0], x)[1], world)
        number = (counts - int(self.positions is not None)).numpy()  # a query does not find itself
        return Graded(np.arange(len(number)), np.ones(len(number)), number)


@dataclass(frozen=True)
class Judgements:
    """Relevant is what has been judged with a grade above 0; what has a grade below 0 is ignored for the query.

    Each judgement is a local ``query``, in ascending order, the id of an ``item`` on any rank, and the ``grade``.
    """

    query: Int[Tensor, " j"]
    item: Int[Tensor, " j"]
    grade: Float[Tensor, " j"]
    gallery_ids: Int[Tensor, " m"]
    world: World
    caller: str

    def question(self, block: Round) -> Question:
        begin, end = torch.searchsorted(self.query, torch.tensor([block.local.start, block.local.stop])).tolist()
        query = self.query[begin:end] - block.local.start + block.shards.start
        query, item, grade = (block.gathered_unevenly(x) for x in (query, self.item[begin:end], self.grade[begin:end]))
        by_id, order = self.gallery_ids.sort()
        place, count = _occurrences(by_id, item)
        here = count > 0
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

    def labels(self, block: Round) -> Ints:
        return np.zeros(block.shards.size, np.int64)

    def values(self, question: Question, query: Tensor, position: Tensor) -> Int[Tensor, " p"]:
        """Return the grades of items, as the bits of float64."""
        judged, rows = question.judged, max(1, len(self.gallery_ids))
        keys, order = (judged.query * rows + judged.position).sort()
        place, count = _occurrences(keys, query * rows + position)
        grades = torch.zeros(len(query), dtype=torch.float64)
        grades[count > 0] = judged.grade[order][place[count > 0]]
        return grades.view(torch.int64)

    def grades(self, block: Round, query: Tensor, values: Tensor) -> Float[Tensor, " p"]:
        return values.view(torch.float64)

    def pairs(self, question: Question) -> Pairs:
        return question.judged

    def totals(self, world: World) -> Graded:
        kept = self.grade > 0
        query, grade = self.query[kept].numpy(), self.grade[kept].numpy()
        return Graded(query, grade, np.ones(len(query), np.int64)).ordered(best_first=False)


def _occurrences(ascending: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return where each wanted value begins among values in ascending order, and how often it occurs."""
    first, last = (torch.searchsorted(ascending, wanted, right=right) for right in (False, True))
    return first, last - first


Relevance = Labels | Judgements


def nearest_ranking(
    block: Round, gallery: Gallery, relevance: Relevance, queries: Tensor, k: int, totals: Graded
) -> Ranking:
    """Return the ranking of the nearest items of all ranks for the local queries of a round.

    Groups and levels are complete where fewer than k items score higher.
    """
    question = relevance.question(block)
    parts = block.answered_unevenly(*_nearest_groups(block, gallery, relevance, question, block.gathered(queries), k))
    groups = Groups.joined([Groups(*(x.numpy() for x in part)) for part in parts])
    grade = relevance.grades(block, torch.from_numpy(groups.query), torch.from_numpy(groups.value)).numpy()
    levels, where = levels_of(groups)
    kept = grade > 0
    relevant = Graded(where[kept], grade[kept], groups.size[kept])
    return Ranking.of(levels, relevant, _of_round(totals, block), relevance.labels(block), groups)


def _nearest_groups(
    block: Round, gallery: Gallery, relevance: Relevance, question: Question, queries: Float[Tensor, "g d"], k: int
) -> list[Tensor]:
    """Return query, score, value, count of this rank's items among the k nearest, or tied with the k-th, by query."""
    scores, positions, complete = gallery.nearest(block, queries, k, question.excluded)
    depth = min(k, len(gallery))
    kth = scores[:, depth - 1] if depth else torch.empty(len(queries), dtype=torch.float64)
    scanned = (~complete & (kth > -torch.inf)) if gallery.index is None else torch.zeros_like(complete)
    kept = (scores > kth[:, None]) | ((scores == kth[:, None]) & ~scanned[:, None])
    query, column = (kept & (scores > -torch.inf)).nonzero(as_tuple=True)
    values = relevance.values(question, query, positions[query, column])
    parts = [(query, scores[query, column], values, torch.ones_like(query))]
    for some in scanned.nonzero().flatten().split(_QUERIES):
        for start, of_block in gallery.score_blocks(queries[some], question.excluded[some]):
            which, position = (of_block == kth[some, None]).nonzero(as_tuple=True)
            values = relevance.values(question, some[which], position + start)
            which, values, count = _counted(which, values)
            parts.append((some[which], kth[some[which]], values, count))
    columns = [torch.cat(x) for x in zip(*parts, strict=True)]
    order = columns[0].argsort(stable=True)
    return [x[order] for x in columns]


def _counted(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the different pairs of query and value, and how often each occurs."""
    values, code = value.unique(return_inverse=True)
    pairs, count = (query * len(values) + code).unique(return_counts=True)
    return pairs // max(1, len(values)), values[pairs % max(1, len(values))], count


def whole_ranking(block: Round, gallery: Gallery, relevance: Relevance, queries: Tensor, totals: Graded) -> Ranking:
    """Return the positions of all relevant items: owners send scores round, ranks count what is higher or equal."""
    question, rows = relevance.question(block), block.gathered(queries)
    pairs = relevance.pairs(question)
    scores = gallery.pair_scores(rows, pairs.query, pairs.position[:, None])[:, 0]
    parts = block.answered_unevenly(pairs.query, scores, pairs.grade)
    query, score, grade = (torch.cat(x).numpy() for x in zip(*parts, strict=True))
    order = np.lexsort((grade, -score, query))
    query, score, grade = query[order], score[order], grade[order]
    first = changes(query, score)
    local_query, thresholds = torch.from_numpy(query[first]), torch.from_numpy(score[first])
    shards = block.world.shards(local_query)
    all_queries = block.gathered_unevenly(local_query + block.shards.start)
    counts = _counts_at(gallery, question, rows, all_queries, block.gathered_unevenly(thresholds))
    by_rank = exchanged(counts, shards.sizes, [shards.size] * block.world.size, block.world)
    higher, tied = by_rank.view(block.world.size, shards.size, 2).sum(0).numpy().T
    relevant = Graded(parts_of(first, len(query)), grade, np.ones(len(query), dtype=np.int64))
    return Ranking.of((query[first], higher, tied), relevant, _of_round(totals, block), relevance.labels(block))


def _counts_at(
    gallery: Gallery, question: Question, queries: Float[Tensor, "g d"], query: Tensor, thresholds: Tensor
) -> Int[Tensor, "t 2"]:
    """Return how many local items score above, and at, each of a query's different, falling thresholds."""
    sizes = torch.bincount(query, minlength=len(queries))
    result = torch.zeros(len(query), 2, dtype=torch.int64)
    ends = sizes.cumsum(0)
    for some in torch.arange(len(queries)).split(_QUERIES):
        part = slice(int(ends[some[0]] - sizes[some[0]]), int(ends[some[-1]]))
        owner, column = expanded(sizes[some])
        width = int(sizes[some].max())
        column = width - 1 - column  # ascending, and padded on the left
        ladder = torch.full((len(some), width), -torch.inf, dtype=torch.float64)
        ladder[owner, column] = thresholds[part]
        lower = torch.zeros(len(some), width + 1, dtype=torch.int64)
        equal = torch.zeros_like(lower)
        for _, scores in gallery.score_blocks(queries[some], question.excluded[some]):
            below = torch.searchsorted(ladder, scores)
            same = torch.nn.functional.pad(ladder, (0, 1), value=torch.inf).gather(1, below) == scores
            lower.scatter_add_(1, below, torch.ones_like(below))
            equal.scatter_add_(1, below, same.long())
        # a score is higher than threshold j if more than j thresholds are below it
        higher = lower.flip(1).cumsum(1).flip(1)[:, 1:]
        result[part] = torch.stack([higher[owner, column], equal[owner, column]], 1)
    return result


def _of_round(totals: Graded, block: Round) -> Graded:
    query, grade, count = totals
    begin, end = np.searchsorted(query, [block.local.start, block.local.stop])
    return Graded(query[begin:end] - block.local.start, grade[begin:end], count[begin:end])


def expanded(counts: Int[Tensor, " n"]) -> tuple[Int[Tensor, " p"], Int[Tensor, " p"]]:
    """Return for each of Σ counts places whose it is, and its number among them."""
    owner = torch.repeat_interleave(counts)
    return owner, torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]


def rectangle(query: Tensor, position: Tensor, queries: int) -> Int[Tensor, "g e"]:
    """Return the positions of each query as a row, padded with −1; ``query`` is in ascending order."""
    counts = torch.bincount(query, minlength=queries)
    owner, column = expanded(counts)
    rows = torch.full((queries, int(counts.max()) if queries else 0), -1)
    rows[owner, column] = position
    return rows
