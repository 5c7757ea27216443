"""An evaluation as one rank sees it: its arguments, agreed on by all ranks, the samples that count, and what is relevant."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from contrastive_zoo.metrics.ranking import KNN, Metric, Runs, names_problem, running_before
from contrastive_zoo.metrics.rounds import Round, ask, local_positions
from contrastive_zoo.metrics.search import overflow_problem, repeated_problem, rows_problem, settings_problem
from contrastive_zoo.ranks.messages import reported
from contrastive_zoo.ranks.row_checks import described, labels_problem, tensor_problem, word_problem
from contrastive_zoo.ranks.session import agree
from contrastive_zoo.ranks.world import Processes, Shards, World

_GRADES = 1e300  # the largest grade: a query has fewer than 1e8 judged items
ROWS, NUMBERS = ("queries", "gallery"), ("labels", "gallery_labels", "ids", "gallery_ids")
_SETTINGS = ("metrics", "reduction", "normalize")
JUDGED = ("judged_queries", "judged_items", "grades")
Reduction: TypeAlias = Literal["mean", "none"]
DEFAULT = ("precision@1", "r_precision", "map@r")


@dataclass(frozen=True)
class Evaluation:
    """The arguments of one rank; see :func:`contrastive_zoo.metrics.evaluate`."""

    queries: Tensor
    gallery: Tensor | None = None
    metrics: Sequence[str] = DEFAULT
    labels: Tensor | None = None
    gallery_labels: Tensor | None = None
    judgements: tuple[Tensor, Tensor, Tensor] | None = None
    ids: Tensor | None = None
    gallery_ids: Tensor | None = None
    reduction: Reduction = "mean"
    normalize: bool = True
    process_group: Processes = None

    @property
    def rows(self) -> Tensor:
        return self.queries if self.gallery is None else self.gallery

    @property
    def valid_metrics(self) -> list[Metric]:
        return [metric for name in self.metrics if (metric := Metric.of(name))]

    @property
    def finds_by_id(self) -> bool:
        """Whether the query itself is known in the gallery by its id; judgements name queries and items apart."""
        return self.labels is not None and self.ids is not None and self.gallery_ids is not None

    def tensors(self) -> dict[str, Tensor]:
        """Return what there is, by name; the three parts of judgements by names of their own."""
        result = {name: x for name in (*ROWS, *NUMBERS) if (x := getattr(self, name)) is not None}
        if isinstance(self.judgements, (list, tuple)) and len(self.judgements) == 3:
            result |= zip(JUDGED, self.judgements, strict=True)
        return result

    def shapes_problem(self) -> str | None:
        if (problem := rows_problem(self.queries, self.rows)) is not None:
            return problem
        if self.gallery is not None and not self.finds_by_id:
            fix = "Leave out gallery, or pass evaluate the ids and gallery_ids of the rows."
            if problem := repeated_problem(self.queries, self.gallery, fix):
                return problem
        for name in NUMBERS:
            x, of = getattr(self, name), self.gallery if name.startswith("gallery") else self.queries
            if x is not None and of is None:
                plain = name.removeprefix("gallery_")
                return f"{name} belong to a gallery, got none. Rows that search among themselves have {plain}."
            if x is not None and of is not None and (problem := labels_problem(name, x, len(of))):
                return problem
        if self.judgements is None:
            return None
        if not isinstance(self.judgements, (list, tuple)) or len(self.judgements) != 3:
            return f"judgements are query ids, gallery ids and grades, three tensors, got {described(self.judgements)}."
        if problem := next(filter(None, map(tensor_problem, JUDGED, self.judgements)), None):
            return problem
        query, item, grade = self.judgements
        if not (query.ndim == 1 and query.shape == item.shape == grade.shape):
            shapes = ", ".join(described(x) for x in self.judgements)
            return f"judgements are query ids [j], gallery ids [j] and grades [j], got {shapes}."
        if query.is_floating_point() or item.is_floating_point():
            return f"judgements name integer ids, got {described(query)} and {described(item)}."
        return None

    def problem(self) -> str | None:
        problem = names_problem(self.metrics) or self.inputs_problem()
        problem = problem or word_problem("reduction", self.reduction, Reduction)
        if problem := problem or settings_problem(normalize=self.normalize):
            return problem
        if self.judgements is not None and any(x.kind == KNN for x in self.valid_metrics):
            return "knn_accuracy needs labels, got judgements."
        return overflow_problem(self.normalize, queries=self.queries, gallery=self.rows)

    def inputs_problem(self) -> str | None:
        if (problem := self.shapes_problem()) is not None:
            return problem
        if self.gallery is None and self.labels is None and self.judgements is None:
            return "labels are missing: call evaluate(embeddings, labels=labels), or pass a gallery or judgements."
        if self.gallery is not None and (self.labels is None) != (self.gallery_labels is None):
            return "labels and gallery_labels come together; without them, partners have the same index."
        if self.judgements is None:
            return None
        if self.labels is not None:
            return "labels or judgements say which items are relevant, got both. Pass one of them."
        if self.ids is None or (self.gallery is not None and self.gallery_ids is None):
            return "judgements name rows by id: pass ids and gallery_ids."
        query, item, grade = (x.cpu() for x in self.judgements)  # of the data set, and ids may be on the model's device
        if _GRADES < (largest := float(grade.max()) if len(grade) else 0.0) < torch.inf:
            return f"grades must be at most {_GRADES:g}, as gains are added, got {largest:g}."
        if bool((unknown := ~torch.isin(query, self.ids.cpu())).any()):
            return f"judgements name query {query[unknown][0].item()}, which is not in ids of this rank."
        if len(torch.stack([query, item]).unique(dim=1).T) < len(query):
            return "judgements name a pair twice. Keep one grade of each query and item."
        return None


class Pairs(NamedTuple):
    """Relevant pairs, ordered by query."""

    query: Int[Tensor, " p"]  # within the round
    position: Int[Tensor, " p"]  # of the item in this rank's gallery
    grade: Float[Tensor, " p"]  # above 0


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
    itself: Int[Tensor, " n"]  # the item that is the query itself, in the gallery of all ranks; −1 if it is not there
    is_relevant: Bool[Tensor, " n"]  # whether this item has the label of the query
    start: int  # the index of this rank's first item in the gallery of all ranks

    def question(self, block: Round) -> Question:
        excluded = local_positions(block.gathered(self.itself), self.start, len(self.gallery))[:, None]
        nothing = torch.empty(0, dtype=torch.int64)
        return Question(block.gathered(self.queries), Pairs(nothing, nothing, nothing.double()), excluded)

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

    def totals(self, world: World) -> Runs:
        """Return the relevant items of each query in the best order: rank ``label mod W`` counts those of a label."""

        def counted(rows: Tensor) -> Tensor:
            items = rows[rows[:, 1] == 1, 0].sort().values
            return _occurrences(items, rows[:, 0].contiguous())[1]

        items = pad(self.gallery[:, None], (0, 1), value=1)
        rows = torch.cat([items, pad(self.queries[:, None], (0, 1))])
        counts = ask(rows[:, 0].remainder(world.size), rows, counted, world)[len(items) :]
        number = (counts - self.is_relevant.long()).numpy()  # a query does not find itself
        return Runs(np.arange(len(number)), np.zeros_like(number), number, np.ones(len(number)))


@dataclass(frozen=True)
class Judgements:
    """Relevant is what has been judged with a grade above 0; what has a grade below 0 is ignored for the query."""

    queries: Int[Tensor, " n"]  # their ids
    query: Int[Tensor, " j"]  # local, in ascending order
    item: Int[Tensor, " j"]  # ids of items on any rank
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
        counts = torch.bincount(query[grade < 0], minlength=block.shards.total)
        excluded = torch.full((len(counts), int(counts.max()) if len(counts) else 0), -1)
        excluded[expanded(counts)] = position[grade < 0]
        kept = grade > 0
        return Question(torch.empty(0, dtype=torch.int64), Pairs(query[kept], position[kept], grade[kept]), excluded)

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

    def totals(self, world: World) -> Runs:
        kept = self.grade > 0
        query, grade = self.query[kept].numpy(), self.grade[kept].numpy()
        order = np.lexsort((-grade, query))
        query, ones = query[order], np.ones_like(query)
        return Runs(query, running_before(query, ones), ones, grade[order])


def _occurrences(ascending: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return where each wanted value begins among values in ascending order, and how often it occurs."""
    first, last = (torch.searchsorted(ascending, wanted, right=right) for right in (False, True))
    return first, last - first


Relevance = Labels | Judgements


def expanded(counts: Int[Tensor, " n"]) -> tuple[Int[Tensor, " p"], Int[Tensor, " p"]]:
    """Return for each of Σ counts places whose it is, and its number among them."""
    owner = torch.repeat_interleave(counts)
    return owner, torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]


class Side(NamedTuple):
    """This rank's queries, or its part of the gallery: those samples that count."""

    rows: Float[Tensor, "n d"]
    labels: Int[Tensor, " n"]  # without labels, the number of the sample on all ranks
    ids: Int[Tensor, " n"]  # empty if there are none
    shards: Shards
    kept: Bool[Tensor, " m"]  # which of this rank's samples count


def agreed_task(caller: str, evaluation: Evaluation, world: World) -> tuple[Side, Side, Relevance]:
    """Return this rank's queries, its part of the gallery, and what is relevant."""
    settings = {name: getattr(evaluation, name) for name in _SETTINGS} | {"leave one out": evaluation.gallery is None}
    ids = evaluation.ids if evaluation.gallery is None else evaluation.gallery_ids  # tell which rows are repeated
    distinct = evaluation.rows if ids is None else None
    stated: Any = {"problem": evaluation.problem(), "settings": settings, "distinct": distinct}
    shards = agree(caller, evaluation.tensors(), world=world, **stated).shards
    totals = [split.total for split in shards[:2]]
    if evaluation.labels is None and evaluation.judgements is None and totals[0] != totals[1]:
        raise ValueError(
            f"{caller}: without labels row i of the gallery is query i's partner, got {totals[0]} queries and {totals[1]} "
            "rows on all ranks."
        )

    def side(rows: Tensor, labels: Tensor | None, ids: Tensor | None, split: Shards) -> Side:
        numbers = torch.arange(split.start, split.start + split.size) if labels is None else labels.cpu().long()
        kept = torch.ones_like(numbers, dtype=torch.bool) if ids is None else first_of_each(ids.long(), world)
        rows = rows.detach() if bool(kept.all()) else rows.detach()[kept.to(rows.device)]  # no copy if all count
        return Side(
            rows, numbers[kept], numbers[:0] if ids is None else ids.cpu().long()[kept], world.shards(rows), kept
        )

    with reported(world), torch.device("cpu"):
        items = queries = side(evaluation.queries, evaluation.labels, evaluation.ids, shards[0])
        if evaluation.gallery is not None:
            items = side(evaluation.gallery, evaluation.gallery_labels, evaluation.gallery_ids, shards[1])
        if evaluation.judgements is not None:
            return queries, items, _judgements(caller, evaluation, queries.ids, items.ids, world)
        itself, label = torch.full_like(queries.labels, -1), queries.labels
        if evaluation.gallery is None:
            itself = torch.arange(len(itself)) + queries.shards.start
        elif evaluation.finds_by_id:
            itself, label = _found_by_id(queries.ids, items, world)
        is_relevant = (itself >= 0) & (label == queries.labels)
        return queries, items, Labels(queries.labels, items.labels, itself, is_relevant, items.shards.start)


def _judgements(caller: str, evaluation: Evaluation, ids: Tensor, gallery_ids: Tensor, world: World) -> Judgements:
    """Return the judgements of the queries that count, by query; of leave-one-out, each query ignores itself."""
    assert evaluation.judgements is not None
    query, item, grade = (x.detach().cpu() for x in evaluation.judgements)
    if evaluation.gallery is None:
        others = query != item
        query, item = torch.cat([query[others], ids]), torch.cat([item[others], ids])
        grade = torch.cat([grade[others].double(), torch.full((len(ids),), -1.0, dtype=torch.float64)])
    counts, (by_id, order) = torch.isin(query, ids), ids.sort()
    row, item, grade = order[torch.searchsorted(by_id, query[counts])], item[counts].long(), grade[counts].double()
    in_order = row.argsort(stable=True)
    return Judgements(ids, row[in_order], item[in_order], grade[in_order], gallery_ids, world, caller)


def _found_by_id(ids: Int[Tensor, " n"], items: Side, world: World) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
    """Return index and label of the item with each id, in the gallery of all ranks; −1 and −1 where there is none."""

    def with_the_id(rows: Tensor) -> Tensor:
        known = rows[rows[:, 1] >= 0]
        known = known[known[:, 0].argsort()]
        place, count = _occurrences(known[:, 0].contiguous(), rows[:, 0].contiguous())
        return torch.cat([known, known.new_full((1, 3), -1)])[place.masked_fill(count == 0, -1), 1:]

    indices = torch.arange(len(items.ids)) + items.shards.start
    rows = torch.cat([torch.stack([items.ids, indices, items.labels], 1), pad(ids[:, None], (0, 2), value=-1)])
    index, label = ask(rows[:, 0].remainder(world.size), rows, with_the_id, world)[len(indices) :].T
    return index, label


def first_of_each(ids: Int[Tensor, " n"], world: World) -> Bool[Tensor, " n"]:
    """Return which samples are the first with their id, in the order of all ranks': rank ``id mod W`` compares them."""

    def is_first(of_home: Tensor) -> Tensor:
        by_id, rows = of_home.sort(stable=True)  # received in rank order, so the first of equal ids is the first sample
        first = torch.ones(len(of_home), dtype=torch.bool)
        first[rows[1:]] = by_id[1:] != by_id[:-1]
        return first

    ids = ids.cpu()
    return ask(ids.remainder(world.size), ids, is_first, world)
