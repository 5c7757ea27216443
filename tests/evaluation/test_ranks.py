"""Metrics are the same bits for every split; the invariants catch the mistakes that they are made for."""

import math
import sys
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import contrastive_zoo as cz
from contrastive_zoo.metrics.exact import prepared
from contrastive_zoo.metrics.local_search import Gallery
from contrastive_zoo.ranks.world import World
from contrastive_zoo.testing.invariant import Broken
from tests.evaluation.by_hand import few_scores
from tests.helpers import common_error, local_shard, numbers

NAMES = ["precision@1", "recall@5", "hit_rate@3", "r_precision", "map", "map@r", "mrr", "ndcg", "knn_accuracy@3"]
SPLITS = [(47,), (20, 27), (0, 40, 7), (1, 0, 46, 0), (12, 12, 12, 11)]


def rows_of(kind, seed=0):
    draw = torch.Generator().manual_seed(seed)
    if kind == "ties":
        return few_scores(47, 0, seed)[0]
    rows = torch.randn(47, 16, generator=draw)
    if kind == "near ties":  # float32 cannot tell them apart
        return (torch.ones(47, 16, dtype=torch.float64) + 1e-9 * rows).double()
    return rows


LABELS = torch.randint(6, (47,), generator=torch.Generator().manual_seed(1))


# ------------------------------------------------------------------------------------------------------------ invariants


def on_ranks(measure, rows, labels, ids, split, worlds):
    """Return the metrics that each rank finds; ``measure`` gets its embeddings, labels and ids."""
    each = list(zip(*(x.split(list(split)) for x in (rows, labels, ids)), strict=True))
    return worlds.run(len(split), measure, each=each)


def compare(found, expected, what):
    for name, value in expected.items():
        if found[name] != value and not (math.isnan(found[name]) and math.isnan(value)):
            raise Broken(f"{name} of {what} is {found[name]!r}; expected: {value!r}")


def same_for_every_split(measure, rows, worlds, splits=SPLITS):
    """Metrics are the same bits on every rank, for every split of the samples over ranks, empty ranks included."""
    expected = None
    for split in splits:
        for rank, found in enumerate(on_ranks(measure, rows, LABELS, torch.arange(47), split, worlds)):
            expected = expected or found
            compare(found, expected, f"rank {rank} of shards {split}")


def invariant_to_row_order(measure, rows, worlds):
    """Metrics do not depend on the order of samples, not even where scores are equal."""
    orders = torch.arange(47), torch.randperm(47, generator=torch.Generator().manual_seed(99))
    first, second = (on_ranks(measure, rows[x], LABELS[x], x, (17, 30), worlds)[0] for x in orders)
    compare(second, first, "shuffled rows")


def repeated_samples_count_once(measure, rows, worlds):
    """Samples that repeat the id of another one change nothing, as a padded sampler repeats samples on other ranks."""
    whole = torch.arange(47)
    padded = torch.cat([torch.cat([part, torch.zeros(1, dtype=torch.int64)]) for part in whole.split([17, 30])])
    expected = on_ranks(measure, rows, LABELS, whole, (17, 30), worlds)[0]
    found = on_ranks(measure, rows[padded], LABELS[padded], padded, (18, 31), worlds)[0]
    compare(found, expected, "repeated samples")


@pytest.mark.parametrize(
    ("kind", "ties"),
    [("random", "pessimistic"), ("ties", "expected"), ("near ties", "optimistic"), ("ties", "pessimistic")],
)
def test_metrics_obey_the_invariants(kind, ties, worlds):
    def measure(rows, labels, ids):
        return cz.metrics.evaluate(rows, labels=labels, ids=ids, metrics=NAMES, ties=ties)

    for invariant in (same_for_every_split, invariant_to_row_order, repeated_samples_count_once):
        invariant(measure, rows_of(kind), worlds)


# -------------------------------------------------------------------------------------------------------- mutants


def local_queries(rows, labels, ids):
    """Each rank's number for its own queries and items."""
    return cz.metrics.evaluate(rows, labels=labels, metrics=["hit_rate@1"], process_group=cz.World())


def mean_of_means(rows, labels, ids):
    """Each rank's share of hits among all items, averaged over ranks."""
    gallery, of_gallery = cz.collectives.all_gather(rows), cz.collectives.all_gather(labels)
    start = World.of().shards(rows).start
    scores = rows @ gallery.T
    scores.diagonal(start).fill_(-math.inf)
    share = (of_gallery[scores.argmax(1)] == labels).double().sum() / max(1, len(rows))
    dist.all_reduce(share)
    return {"accuracy": share.item() / dist.get_world_size()}


def first_of_ties(rows, labels, ids):
    """Of equal scores the first item counts."""
    gallery, of_gallery = cz.collectives.all_gather(rows), cz.collectives.all_gather(labels)
    nearest = (rows.double() @ gallery.double().T).argmax(1)
    hits = torch.tensor([(of_gallery[nearest] == labels).sum(), len(rows)], dtype=torch.float64)
    dist.all_reduce(hits)
    return {"accuracy": (hits[0] / hits[1]).item()}


def without_ids(rows, labels, ids):
    """Repeated samples count."""
    return cz.metrics.evaluate(rows, labels=labels, metrics=["hit_rate@1"])


@pytest.mark.parametrize(
    ("mutant", "invariant", "rows"),
    [
        (local_queries, same_for_every_split, rows_of("random")),
        (mean_of_means, same_for_every_split, rows_of("random")),
        (first_of_ties, invariant_to_row_order, torch.ones(47, 3)),
        (without_ids, repeated_samples_count_once, rows_of("random")),
    ],
)
def test_each_invariant_catches_its_mistakes(mutant, invariant, rows, worlds):
    with pytest.raises(Broken):
        invariant(mutant, rows, worlds)


# ---------------------------------------------------------------------------------------------------------- search


@pytest.mark.parametrize("kind", ["random", "ties", "near ties"])
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_the_nearest_rows_are_those_of_one_process(kind, leave_one_out, worlds):
    rows, other = rows_of(kind), rows_of(kind, 1)
    excluded = torch.stack([torch.arange(47).roll(3), torch.full((47,), -1)], 1)

    def search(queries, excluded, gallery):
        return tuple(cz.metrics.top_k(queries, None if leave_one_out else gallery, k=5, excluded=excluded))

    ((scores, indices),) = worlds.run(1, search, rows, excluded, other)
    unit, unit_rows = (F.normalize(x.double(), dim=1) for x in (rows, rows if leave_one_out else other))
    expected = unit @ unit_rows.T
    expected[torch.arange(47), excluded[:, 0]] = -math.inf
    if leave_one_out:
        expected.fill_diagonal_(-math.inf)
    assert torch.allclose(scores, expected.sort(descending=True).values[:, :5], rtol=0, atol=1e-7)
    assert torch.allclose(scores, expected.gather(1, indices), rtol=0, atol=1e-7)
    if kind != "near ties":
        assert not ((scores[:, 1:] == scores[:, :-1]) & (indices[:, 1:] < indices[:, :-1])).any()
    for split, of_gallery in (((20, 27), (0, 47)), ((0, 40, 7), (3, 1, 43))):
        each = list(zip(rows.split(split), excluded.split(split), other.split(of_gallery), strict=True))
        found = worlds.run(len(split), search, each=each)
        assert torch.equal(torch.cat([x for x, _ in found]), scores)
        assert torch.equal(torch.cat([y for _, y in found]), indices)


def test_queries_and_gallery_have_splits_of_their_own(worlds):
    rows, other = rows_of("ties"), rows_of("ties", 1)
    grades = torch.randint(-1, 3, (47, 47), generator=torch.Generator().manual_seed(2))
    query, item = (grades != 0).nonzero(as_tuple=True)

    def job(queries, gallery, ids, items):
        own = torch.isin(query, ids)
        judgements = query[own], item[own] + 100, grades[query[own], item[own]].float()
        return cz.metrics.evaluate(queries, gallery, ids=ids, gallery_ids=items, judgements=judgements,
                           metrics=["map", "ndcg", "ndcg@4", "recall@2"], ties="expected"), cz.metrics.evaluate(
                           queries, gallery, metrics=["hit_rate@7", "mrr"])  # fmt: skip

    results = []
    for split, of_gallery in (((47,), (47,)), ((20, 27), (0, 47)), ((0, 40, 7), (3, 1, 43))):
        numbers = torch.arange(47).split(split), torch.arange(100, 147).split(of_gallery)
        each = list(zip(rows.split(split), other.split(of_gallery), *numbers, strict=True))
        results += worlds.run(len(split), job, each=each)
    assert all(found == results[0] for found in results), results


@pytest.mark.parametrize("scale", [1.0, 1e25])  # at 1e25 the dot products exceed float32
def test_only_candidates_that_may_be_neighbours_of_all_ranks_are_compared(scale, worlds):
    draw = torch.Generator().manual_seed(0)
    rows, queries = torch.randn(2000, 8, generator=draw) * scale, torch.randn(60, 8, generator=draw) * scale
    rows[1000:1200] = rows[:200]  # ties on different ranks

    def search(queries, gallery):
        return tuple(cz.metrics.top_k(queries, gallery, k=30, normalize=False))

    expected = search(queries, rows)
    scores = queries.double() @ rows.double().T
    assert torch.allclose(expected[0], scores.sort(descending=True).values[:, :30], rtol=1e-12, atol=0)
    for split, of_gallery in (((20, 40), (900, 1100)), ((0, 57, 3), (5, 1995, 0)), ((15, 15, 15, 15), (500,) * 4)):
        each = list(zip(queries.split(split), rows.split(of_gallery), strict=True))
        found = worlds.run(len(split), search, each=each)
        assert torch.equal(torch.cat([x for x, _ in found]), expected[0])
        assert torch.equal(torch.cat([y for _, y in found]), expected[1])


def test_elements_that_float32_does_not_hold_are_compared_in_float64():
    """Below 2^-126 faiss sees zeros: nothing may be certain then."""
    rows = numbers(50, 4, seed=0) * 1e-45
    queries = numbers(5, 4, seed=1) * 1e37
    scores = (queries * 1e-37) @ (rows * 1e45).T
    assert torch.equal(cz.metrics.top_k(queries, rows, k=3, normalize=False).indices, scores.topk(3).indices)


def test_a_rank_compares_its_share_of_the_candidates():
    draw = torch.Generator().manual_seed(0)
    rows, queries = torch.randn(2000, 8, generator=draw), torch.randn(60, 8, generator=draw)
    halves = [Gallery("top_k", half, True, None, World(), ties=False) for half in rows.split(1000)]
    unit, nothing = prepared(queries, normalize=True), torch.empty(60, 0, dtype=torch.int64)
    proposals = [half.proposals(unit, 30, nothing) for half in halves]
    floor = torch.cat([x.reached(30) for x in proposals], 1).topk(30).values[:, -1:]
    found = [half.top(unit, 30, nothing, x, floor) for half, x in zip(halves, proposals, strict=True)]
    compared = sum((scores > -math.inf).sum().item() for scores, _, _ in found)
    assert 60 * 30 <= compared <= 60 * 30 + 6


def test_an_index_is_an_approximation_whose_recall_is_measured(worlds):
    rows = torch.randn(2000, 16, generator=torch.Generator().manual_seed(0))

    def job():
        shard = local_shard(rows, (1500, 500))
        exact, some = (cz.metrics.ApproximateIndex("IVF16,Flat", f"nprobe={number}") for number in (16, 4))
        recalls = [cz.metrics.index_recall(shard[:50], shard, k=5, index=index) for index in (exact, some)]
        labels = torch.arange(len(shard)) % 7
        found = cz.metrics.evaluate(shard, labels=labels, metrics=["precision@5"], index=exact)
        return *recalls, found == cz.metrics.evaluate(shard, labels=labels, metrics=["precision@5"])

    (complete, most, same), other = worlds.run(2, job)
    assert (complete, same) == (1.0, True)
    assert 0.4 < most < 1.0
    assert other == (complete, most, same)


def test_an_index_that_faiss_cannot_build_on_one_rank_is_refused_on_all(worlds):
    rows, labels = torch.randn(300, 4, generator=torch.Generator().manual_seed(0)), torch.arange(300) % 7

    def job(shards, factory, measure):
        index, shard = cz.metrics.ApproximateIndex(factory), local_shard(rows, shards)
        if measure:
            return cz.metrics.evaluate(shard, labels=local_shard(labels, shards), metrics=["precision@1"], index=index)
        return cz.metrics.top_k(shard, k=1, index=index).indices.shape

    few = "rank 1: faiss cannot build the index 'IVF16,Flat' with parameters '' of 10 rows"
    for shards, factory, measure, says in (
        ((290, 10), "IVF16,Flat", False, few),
        ((300, 0), "IVF16,What", True, "rank 0: faiss cannot build the index 'IVF16,What'"),
    ):
        bad = (shards, factory, measure)
        text, good = common_error(worlds, 2, lambda x=bad: job(*x), lambda: job((200, 100), "HNSW16", False))
        assert says in text
        assert "pass index=None" in text
        assert good == [(200, 1), (100, 1)]


# ---------------------------------------------------------------------------------------------------------- errors


def rank():
    return dist.get_rank()


def without(module, function):
    """Call a function on a rank 1 that cannot import a module."""
    with patch.dict(sys.modules, {module: None} if rank() else {}):
        return function()


ONES = torch.ones(3, 2)
IDS = torch.arange(3)
JUDGED = {"ids": IDS, "judgements": (IDS * 0, IDS * 0, torch.ones(3))}


def evaluate_judgements():
    ids, item = IDS + 3 * rank(), IDS[:1] + 9
    return cz.metrics.evaluate(ONES, ids=ids, judgements=(ids[:1], item, torch.ones(1)))


evaluate, top_k, recall_at_k = cz.metrics.evaluate, cz.metrics.top_k, cz.metrics.recall_at_k
MISTAKES = {
    "k beyond the gallery": (lambda: evaluate(ONES, ONES, metrics=["recall@7"]), ("1 and the 6 rows", "got 7")),
    "k of a search": (lambda: top_k(ONES, ONES, k=7), ("1 and the 6 rows", "got 7")),
    "k of leave one out": (lambda: recall_at_k(ONES, labels=IDS, k=6), ("1 and the 5 rows",)),
    "no faiss on one rank": (
        lambda: without("faiss", lambda: top_k(ONES, ONES, k=1)),
        ("rank 1", "pip install contrastive_zoo[faiss]"),
    ),
    "k is zero": (lambda: recall_at_k(ONES, ONES, k=0), ("k is between 1", "got 0")),
    "k differs": (lambda: evaluate(ONES, ONES, metrics=[f"recall@{1 + rank()}"]), ("metrics", "recall@2")),
    "NaN on one rank": (lambda: evaluate(ONES * (math.nan if rank() else 1), labels=IDS), ("rank 1", "NaN")),
    "NaN in a search": (lambda: top_k(ONES, ONES * (math.nan if rank() else 1), k=1), ("gallery", "NaN")),
    "widths of queries": (lambda: evaluate(torch.ones(3, 2 + rank()), labels=IDS), ("width of queries", "d=3")),
    "widths of the gallery": (lambda: evaluate(ONES, torch.ones(3, 4)), ("one width", "[3, 4]")),
    "no labels on one rank": (
        lambda: evaluate(ONES, ONES, **({} if rank() else {"labels": IDS, "gallery_labels": IDS})),
        ("labels",),
    ),
    "labels of the queries alone": (lambda: recall_at_k(ONES, ONES, labels=IDS), ("come together",)),
    "too many labels": (lambda: recall_at_k(ONES, labels=torch.arange(4)), ("one per row, got 4 for 3 rows",)),
    "unmatched query": (
        lambda: evaluate(ONES, ids=IDS, judgements=(IDS + 2 * rank(), IDS, torch.ones(3))),
        ("rank 1", "query 3"),
    ),
    "unmatched item": (evaluate_judgements, ("2 of ", "gallery_ids")),
    "unequal partners": (lambda: evaluate(ONES, ONES[rank() :]), ("6 queries", "5 rows")),
    "unknown metric": (lambda: evaluate(ONES, labels=IDS, metrics=["recall"]), ("no metric recall", "recall@k")),
    "unknown ties": (lambda: evaluate(ONES, labels=IDS, ties="average"), ("'expected'", "'average'")),
    "whole ranking of an index": (
        lambda: evaluate(ONES, labels=IDS, metrics=["map"], index=cz.metrics.ApproximateIndex("HNSW8")),
        ("map needs all positions",),
    ),
    "a pair twice": (lambda: evaluate(ONES, **JUDGED), ("a pair twice",)),
    "excluded of another length": (lambda: top_k(ONES, ONES, k=1, excluded=IDS[:2, None]), ("3 queries",)),
    "dot products that overflow": (
        lambda: evaluate(torch.ones(3, 2).double() * 1e154, labels=IDS, normalize=False),
        ("queries must be below", "got 1e+154"),
    ),
    "dot products of a search": (
        lambda: top_k(ONES.double(), ONES.double() * 10.0 ** (160 * rank()), k=1, normalize=False),
        ("rank 1", "gallery must be below", "dot products overflow"),
    ),
    "norms that overflow": (lambda: evaluate(ONES.double() * 1.5e308, labels=IDS), ("norms overflow",)),
    "grades that overflow": (
        lambda: evaluate(ONES, ids=IDS, judgements=(IDS, IDS, IDS.double() * 5e307)),
        ("grades must be at most 1e+300",),
    ),
    "k is a list": (lambda: recall_at_k(ONES, ONES, k=[1, 2]), ("k is between 1", "got [1, 2]")),
    "an empty gallery": (lambda: top_k(ONES, ONES[:0], k=1), ("0 rows",)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_error_on_every_rank(mistake, worlds):
    bad, words = MISTAKES[mistake]
    text, after = common_error(worlds, 2, bad, lambda: recall_at_k(torch.eye(3)[[rank()]], torch.eye(3)[[rank()]]))
    assert all(word in text for word in words), text
    assert after == [1.0, 1.0]
