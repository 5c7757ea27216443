"""The rows that count: without repetitions of an id and without ignored labels; and what is relevant to each query."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from contrastive_zoo.metrics.checks import EvaluationInputs
from contrastive_zoo.metrics.relevance import Judgements, Labels
from contrastive_zoo.metrics.rounds import exchanged
from contrastive_zoo.ranks.world import Shards, World


def first_of_each(ids: Int[Tensor, " n"], world: World) -> Bool[Tensor, " n"]:
    """Return which rows are the first with their id, in the order of all ranks' rows.

    Samplers that pad repeat samples, so that every rank has equally many; these count once. Rank ``id mod W`` compares the
    rows with this id.
    """
    ids = ids.cpu()
    home = ids.remainder(world.size)
    order = home.argsort(stable=True)
    send = torch.bincount(home, minlength=world.size).tolist()
    receive = [sizes[world.rank] for sizes in world.exchange(send)]
    asked = exchanged(ids[order], send, receive, world)
    by_id, rows = asked.sort(stable=True)  # received in rank order, so the first of equal ids is the first row
    repeated = torch.zeros(len(asked), dtype=torch.bool)
    repeated[rows[1:]] = by_id[1:] == by_id[:-1]
    told = exchanged(repeated, receive, send, world)
    first = torch.empty(len(ids), dtype=torch.bool)
    first[order] = ~told
    return first


@dataclass(frozen=True)
class Task:
    """An evaluation as one rank sees it.

    Args:
        queries: this rank's queries that count.
        gallery: this rank's rows that count.
        query_shards: how the queries are split over ranks.
        gallery_shards: how the gallery is split over ranks.
        relevance: what is relevant to a query.
    """

    queries: Tensor
    gallery: Tensor
    query_shards: Shards
    gallery_shards: Shards
    relevance: Labels | Judgements


def task_of(caller: str, inputs: EvaluationInputs, queries: Shards, gallery: Shards, world: World) -> Task:
    """Return the task, given the split of all rows over ranks; ``caller`` is the first word of errors."""
    leave_one_out = inputs.gallery is None
    labels, gallery_labels = (
        x.cpu().long() if x is not None else torch.arange(of.start, of.start + of.size)
        for x, of in ((inputs.labels, queries), (inputs.labels if leave_one_out else inputs.gallery_labels, gallery))
    )
    kept = _kept(inputs.ids, labels, inputs.ignore_label, world)
    gallery_kept = kept if leave_one_out else _kept(inputs.gallery_ids, gallery_labels, inputs.ignore_label, world)
    rows, gallery_rows = _where(kept, inputs.queries), _where(gallery_kept, inputs.rows)
    query_shards, gallery_shards = world.shards(rows), world.shards(gallery_rows)
    relevance: Labels | Judgements
    if inputs.judgements is None:
        own = torch.arange(len(rows)) + gallery_shards.start if leave_one_out else None
        relevance = Labels(labels[kept], gallery_labels[gallery_kept], own, gallery_shards.start)
    else:
        assert inputs.ids is not None  # EvaluationInputs.problem has refused it
        ids = inputs.ids.cpu().long()[kept]
        gallery_ids = inputs.ids if inputs.gallery_ids is None else inputs.gallery_ids
        relevance = _judgements(caller, inputs, ids, gallery_ids.cpu().long()[gallery_kept], world)
    return Task(rows.detach(), gallery_rows.detach(), query_shards, gallery_shards, relevance)


def _judgements(caller: str, inputs: EvaluationInputs, ids: Tensor, gallery_ids: Tensor, world: World) -> Judgements:
    """Return the judgements of the queries that count, ordered by query; of leave-one-out, each query ignores itself."""
    assert inputs.judgements is not None
    query, item, grade = (x.detach().cpu() for x in inputs.judgements)
    if inputs.gallery is None:
        query, item = torch.cat([query, ids]), torch.cat([item, ids])
        grade = torch.cat([grade.double(), torch.full((len(ids),), -1.0, dtype=torch.float64)])
    by_id, order = ids.sort()
    counts = torch.isin(query, ids)
    query, item, grade = query[counts], item[counts].long(), grade[counts].double()
    row = order[torch.searchsorted(by_id, query)]
    in_order = row.argsort(stable=True)
    return Judgements(row[in_order], item[in_order], grade[in_order], gallery_ids, world, caller)


def _kept(ids: Tensor | None, labels: Tensor, ignore_label: int | None, world: World) -> Tensor:
    """Return which rows count."""
    kept = torch.ones_like(labels, dtype=torch.bool) if ids is None else first_of_each(ids.long(), world)
    return kept if ignore_label is None else kept & (labels != ignore_label)


def _where(kept: Tensor, rows: Tensor) -> Tensor:
    """Return the rows that count; no copy if all do."""
    return rows if bool(kept.all()) else rows[kept.to(rows.device)]
