"""An evaluation as one rank sees it: its arguments, agreed on by all ranks, the samples that count, and what is relevant."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from contrastive_zoo.metrics.local_search import ApproximateIndex, faiss_problem
from contrastive_zoo.metrics.passes import Judgements, Labels
from contrastive_zoo.metrics.ranking import KNN, Metric, Ties, names_problem
from contrastive_zoo.metrics.rounds import ask
from contrastive_zoo.metrics.search import overflow_problem, rows_problem, settings_problem
from contrastive_zoo.ranks.messages import reported
from contrastive_zoo.ranks.row_checks import described, is_integer, labels_problem, tensor_problem, word_problem
from contrastive_zoo.ranks.session import agree_on_shards
from contrastive_zoo.ranks.world import Shards, World

_GRADES = 1e300
"""The largest grade: a query has fewer than 1e8 judged items."""

ROWS, NUMBERS = ("queries", "gallery"), ("labels", "gallery_labels", "ids", "gallery_ids")
JUDGED = ("judged_queries", "judged_items", "grades")


DEFAULT = ("precision@1", "r_precision", "map@r")
"""The metrics of an evaluation that names none."""


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
    ignore_label: int | None = None
    ties: Ties = "pessimistic"
    normalize: bool = True
    index: ApproximateIndex | None = None

    @property
    def rows(self) -> Tensor:
        return self.queries if self.gallery is None else self.gallery

    @property
    def valid_metrics(self) -> list[Metric]:
        return [metric for name in self.metrics if (metric := Metric.of(name))]

    def tensors(self) -> dict[str, Tensor]:
        """Return what there is, by name; the three parts of judgements by names of their own."""
        result = {name: x for name in (*ROWS, *NUMBERS) if (x := getattr(self, name)) is not None}
        if isinstance(self.judgements, (list, tuple)) and len(self.judgements) == 3:
            result |= zip(JUDGED, self.judgements, strict=True)
        return {name: x.detach() if isinstance(x, Tensor) else x for name, x in result.items()}

    def shapes_problem(self) -> str | None:
        if (problem := rows_problem(self.queries, self.rows)) is not None:
            return problem
        for name in NUMBERS:
            x, of = getattr(self, name), self.gallery if name.startswith("gallery") else self.queries
            if x is not None and of is None:
                name_of_queries = name.removeprefix("gallery_")
                return (
                    f"{name} belong to a gallery, got none. Rows that search among themselves have {name_of_queries}."
                )
            if x is not None and of is not None and (problem := labels_problem(name, x, len(of))):
                return problem
        if self.judgements is None:
            return None
        if not isinstance(self.judgements, (list, tuple)) or len(self.judgements) != 3:
            return f"judgements are query ids, gallery ids and grades, three tensors, got {described(self.judgements)}."
        for name, x in zip(JUDGED, self.judgements, strict=True):
            if problem := tensor_problem(name, x):
                return problem
        query, item, grade = self.judgements
        if not (query.ndim == 1 and query.shape == item.shape == grade.shape):
            shapes = ", ".join(described(x) for x in self.judgements)
            return f"judgements are query ids [j], gallery ids [j] and grades [j], got {shapes}."
        if query.is_floating_point() or item.is_floating_point():
            return f"judgements name integer ids, got {described(query)} and {described(item)}."
        return None

    def problem(self) -> str | None:
        return faiss_problem() or names_problem(self.metrics) or self.inputs_problem() or self._settings_problem()

    def _settings_problem(self) -> str | None:
        """Return why these settings, of valid metrics, do not go with the arguments."""
        metrics = self.valid_metrics
        problem = settings_problem(normalize=self.normalize, index=self.index) or word_problem("ties", self.ties, Ties)
        if problem is None and self.index is not None and (whole := [x.name for x in metrics if x.whole]):
            return f"{', '.join(whole)} needs all positions, which an approximate index does not find. Pass index=None."
        if problem is None and self.judgements is not None and any(x.kind == KNN for x in metrics):
            return "knn_accuracy needs labels, got judgements."
        return problem or overflow_problem(self.normalize, queries=self.queries, gallery=self.rows)

    def inputs_problem(self) -> str | None:
        """Return why the rows, and what is known about them, do not belong together, in words."""
        if (problem := self.shapes_problem()) is not None:
            return problem
        if self.gallery is None and self.labels is None and self.judgements is None:
            return "rows that search among themselves need labels or judgements."
        if self.gallery is not None and (self.labels is None) != (self.gallery_labels is None):
            return "labels and gallery_labels come together; without them, partners have the same index."
        if self.ignore_label is not None and self.labels is None:
            return "ignore_label needs labels."
        if not (self.ignore_label is None or is_integer(self.ignore_label, at_least=-(2**63), at_most=2**63 - 1)):
            return f"ignore_label is an integer of 64 bits or None, got {described(self.ignore_label)}."
        if self.judgements is None:
            return None
        if self.labels is not None:
            return "relevant is what has the same label or what is judged: pass labels or judgements, not both."
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


class Task(NamedTuple):
    """This rank's queries and gallery that count, their split over the ranks, what is relevant, and which queries count."""

    queries: Tensor
    gallery: Tensor
    query_shards: Shards
    gallery_shards: Shards
    relevance: Labels | Judgements
    kept: Bool[Tensor, " n"]


def agreed_task(caller: str, evaluation: Evaluation, world: World) -> Task:
    """Return the task, agreed on by all ranks; repeated ids and ignored labels do not count."""
    leave_one_out = evaluation.gallery is None
    settings = {name: getattr(evaluation, name) for name in ("metrics", "ties", "normalize", "index", "ignore_label")}
    settings |= {"leave one out": leave_one_out}
    shards = agree_on_shards(caller, evaluation.tensors(), world=world, problem=evaluation.problem(), settings=settings)
    queries, gallery = shards[0], shards[0 if leave_one_out else 1]
    if evaluation.labels is None and evaluation.judgements is None and queries.total != gallery.total:
        raise ValueError(
            f"{caller}: without labels row i of the gallery is query i's partner, got {queries.total} queries and "
            f"{gallery.total} rows on all ranks."
        )
    labels, gallery_labels = (
        x.cpu().long() if x is not None else torch.arange(split.start, split.start + split.size)
        for x, split in ((evaluation.labels, queries), (evaluation.gallery_labels, gallery))
    )
    with reported(world):
        kept = gallery_kept = _kept(evaluation.ids, labels, evaluation.ignore_label, world)
        if leave_one_out:
            gallery_labels = labels
        else:
            gallery_kept = _kept(evaluation.gallery_ids, gallery_labels, evaluation.ignore_label, world)
        rows, gallery_rows = (  # no copy if all count
            x.detach() if bool(which.all()) else x.detach()[which.to(x.device)]
            for x, which in ((evaluation.queries, kept), (evaluation.rows, gallery_kept))
        )
        query_shards, gallery_shards = world.shards(rows), world.shards(gallery_rows)
        relevance: Labels | Judgements
        if evaluation.judgements is None:
            positions = torch.arange(len(rows)) + gallery_shards.start if leave_one_out else None
            relevance = Labels(labels[kept], gallery_labels[gallery_kept], positions, gallery_shards.start)
        else:
            assert evaluation.ids is not None  # inputs_problem has refused it
            gallery_ids = evaluation.ids if evaluation.gallery_ids is None else evaluation.gallery_ids
            ids_that_count = evaluation.ids.cpu().long()[kept], gallery_ids.cpu().long()[gallery_kept]
            relevance = _judgements(caller, evaluation, *ids_that_count, world)
    return Task(rows, gallery_rows, query_shards, gallery_shards, relevance, kept)


def _judgements(caller: str, evaluation: Evaluation, ids: Tensor, gallery_ids: Tensor, world: World) -> Judgements:
    """Return the judgements of the queries that count, by query; of leave-one-out, each query ignores itself."""
    assert evaluation.judgements is not None
    query, item, grade = (x.detach().cpu() for x in evaluation.judgements)
    if evaluation.gallery is None:
        others = query != item
        query, item = torch.cat([query[others], ids]), torch.cat([item[others], ids])
        grade = torch.cat([grade[others].double(), torch.full((len(ids),), -1.0, dtype=torch.float64)])
    by_id, order = ids.sort()
    counts = torch.isin(query, ids)
    query, item, grade = query[counts], item[counts].long(), grade[counts].double()
    row = order[torch.searchsorted(by_id, query)]
    in_order = row.argsort(stable=True)
    return Judgements(row[in_order], item[in_order], grade[in_order], gallery_ids, world, caller)


def _kept(ids: Tensor | None, labels: Tensor, ignore_label: int | None, world: World) -> Tensor:
    kept = torch.ones_like(labels, dtype=torch.bool) if ids is None else first_of_each(ids.long(), world)
    return kept if ignore_label is None else kept & (labels != ignore_label)


def first_of_each(ids: Int[Tensor, " n"], world: World) -> Bool[Tensor, " n"]:
    """Return which samples are the first with their id, in the order of all ranks': rank ``id mod W`` compares them."""

    def is_first(of_home: Tensor) -> Tensor:
        by_id, rows = of_home.sort(stable=True)  # received in rank order, so the first of equal ids is the first sample
        first = torch.ones(len(of_home), dtype=torch.bool)
        first[rows[1:]] = by_id[1:] != by_id[:-1]
        return first

    ids = ids.cpu()
    return ask(ids.remainder(world.size), ids, is_first, world)
