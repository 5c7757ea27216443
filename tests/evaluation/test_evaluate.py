"""Metrics are those of a plain computation and the same bits for every split; mistakes are caught, faults are heard of."""

import math
from collections import Counter
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from unittest.mock import patch

import ir_measures
import numpy as np
import pytest
import torch
import torch.distributed as dist

import contrastive_zoo as cz
from contrastive_zoo.metrics import measurement
from contrastive_zoo.metrics.exact import similarities
from contrastive_zoo.metrics.ranking import Levels
from tests.helpers import EVERY_CASE, assert_says, error_message, numbers

pytestmark = pytest.mark.data

AT_K = ("precision", "recall", "hit_rate", "map", "mrr", "ndcg")
WHOLE = ("r_precision", "map", "map@r", "mrr", "ndcg")


def awkward(seed):
    draw = torch.Generator().manual_seed(seed)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=draw)

    def one_of(*values):
        return values[integers(0, len(values)).item()]

    relevant, alone = one_of("labels", "labels", "judgements", "judgements", "partners"), one_of(False, True)
    alone = alone and relevant != "partners"
    n, m = integers(2, 9).item(), integers(2, 9).item()
    m = n if alone or relevant == "partners" else m
    sizes = (n,) if alone else (n, m)
    if collapsed := one_of(False, True):
        dtype, direction = one_of(torch.float32, torch.float64), torch.randn(1, 9, generator=draw)
        signs = [integers(-1, 2, size, 1).double() for size in sizes]
        rows = [(x * direction * 10 ** (8 * torch.rand(x.shape, generator=draw) - 4)).to(dtype) for x in signs]
    else:
        signs = [integers(-1, 2, size, 3).double() for size in sizes]
        rows = [x * one_of(1.0, 2.0**-480, 2.0**500) for x in signs]
    scores, grades = signs[0] @ signs[-1].T, torch.eye(n, m).double()
    labels, ids = integers(0, 3, n), integers(-5, 5).item() + torch.randperm(n, generator=draw)
    others, items = (labels, ids) if alone else (integers(0, 3, m), torch.randperm(m, generator=draw))
    of = {"queries": rows[0], "gallery": rows[-1]}
    if relevant == "labels":
        grades = (labels[:, None] == others).double()
        of |= {"labels": labels, "gallery_labels": others}
    elif relevant == "judgements":
        grades = torch.tensor([-1.0, 0.0, 0.0, 1.0, 2.5])[integers(0, 5, n, m)].double()
        query, item = (grades != 0).nonzero(as_tuple=True)
        judgements = ids[query], items[item], grades[query, item]
        grades[grades < 0] = math.nan
    if alone:
        grades.fill_diagonal_(math.nan)
    with_ids = relevant == "judgements" or (relevant == "labels" and one_of(False, True))
    if with_ids and relevant == "labels":  # an item of the query's id is the query itself
        grades = grades.masked_fill(ids[:, None] == items, math.nan)
    if with_ids:
        of |= {"ids": ids, "gallery_ids": items}
        again = [torch.cat([torch.arange(size), integers(0, size, 3)]) for size in sizes]
        of = {name: x[again[-1 if "gallery" in name else 0]] for name, x in of.items()}
    if alone:
        of = {name: x for name, x in of.items() if "gallery" not in name}
    of |= {"judgements": judgements} if relevant == "judgements" else {}
    of |= {"normalize": collapsed}
    candidates = scores.shape[1] - (alone or with_ids)
    k = [integers(1, candidates + 1).item() for _ in AT_K] if candidates > 0 else []
    names = [*WHOLE, *(f"{name}@{number}" for name, number in zip(AT_K, k, strict=bool(k)))]
    expected = {name: metric_by_hand(name, scores, grades) for name in names}
    if k and relevant == "labels":
        votes = scores.masked_fill(grades.isnan(), -math.inf), others, labels
        expected[f"knn_accuracy@{k[0]}"] = knn_accuracy_by_hand(*votes, k[0])
    return of | {"metrics": list(expected)}, expected


# Metrics one query at a time, in plain Python.


def value_of(name, ranked):
    kind, _, cutoff = name.partition("@")
    relevant = [position for position, grade in enumerate(ranked, 1) if grade > 0]
    total = len(relevant)
    k = total if cutoff == "r" or kind == "r_precision" else int(cutoff or len(ranked))
    inside = [position for position in relevant if position <= k]
    gained, best = (
        sum(grade / math.log2(position + 1) for position, grade in enumerate(order[:k], 1))
        for order in (ranked, sorted(ranked, reverse=True))
    )
    return {
        "precision": len(inside) / k,
        "r_precision": len(inside) / k,
        "recall": len(inside) / total,
        "hit_rate": float(bool(inside)),
        "map": sum(number / position for number, position in enumerate(inside, 1)) / total,
        "mrr": 1 / inside[0] if inside else 0.0,
        "ndcg": gained / best,
    }[kind]


def metric_by_hand(name, scores, grades):
    """Return the mean over the queries with a relevant item; a grade of NaN is an item that does not count."""
    values = []
    for row, of_row in zip(scores.tolist(), grades.tolist(), strict=True):
        counted = [(-score, grade) for score, grade in zip(row, of_row, strict=True) if not math.isnan(grade)]
        if any(grade > 0 for _, grade in counted):
            values.append(value_of(name, [grade for _, grade in sorted(counted)]))
    return sum(values) / len(values) if values else math.nan


def knn_accuracy_by_hand(scores, labels, own, k):
    """Return the share of queries whose label has most votes of the k nearest; −∞ is an item that does not count."""
    values = []
    for row, label in zip(scores.tolist(), own.tolist(), strict=True):
        kth = sorted(row, reverse=True)[k - 1]
        votes = Counter(y for s, y in zip(row, labels.tolist(), strict=True) if s >= kth)
        right = votes.pop(label, 0)
        values.append(right > max(votes.values(), default=0))
    return sum(values) / len(values) if values else math.nan


CASES = range(2000 if EVERY_CASE else 48)


def test_awkward_inputs_have_the_metrics_of_a_plain_computation():
    for seed in CASES:
        arguments, expected = awkward(seed)
        assert cz.metrics.evaluate(**arguments) == pytest.approx(expected, abs=1e-12, nan_ok=True), seed


@pytest.mark.parametrize("world_size", [2, 3])
def test_awkward_inputs_have_the_bits_of_one_process(world_size, worlds):
    same_for_every_split(cz.metrics.evaluate, world_size, worlds)


def same_for_every_split(measure, world_size, worlds):
    def on_rank(seeds):
        size, rank = dist.get_world_size(), dist.get_rank()
        parts = [shards(awkward(seed)[0], size, seed)[rank] for seed in seeds]
        one_by_one = patch.object(
            measurement, "_PAIR_COST", 0 if rank else 128
        )  # scores of pairs, on all ranks but one
        with one_by_one, torch.device("meta"):  # the user's default device
            return [repr(measure(**part)) for part in parts]

    seeds = CASES[world_size % 2 :: 2]
    expected = [repr(cz.metrics.evaluate(**awkward(seed)[0])) for seed in seeds]
    assert worlds.run(world_size, on_rank, seeds) == [expected] * world_size


def shards(arguments, number, seed):
    """Return parts of a case, whose queries and gallery are split at random; a part has the judgements of its ids."""
    draw, found = torch.Generator().manual_seed(seed), [dict(arguments) for _ in range(number)]
    for side in ("queries", "gallery") if "gallery" in arguments else ("queries",):
        n = len(arguments[side])
        cuts = torch.randint(n + 1, (number - 1,), generator=draw, device="cpu").sort().values.tolist()
        for name, x in arguments.items():
            if isinstance(x, torch.Tensor) and name.startswith("gallery") == (side == "gallery"):
                for part, of_part in zip(found, x.tensor_split(cuts), strict=True):
                    part[name] = of_part
    for part in found if "judgements" in arguments else ():
        here = torch.isin(arguments["judgements"][0], part["ids"])
        part["judgements"] = tuple(x[here] for x in arguments["judgements"])
    return found


def collected(metrics, normalize, judgements=None, **tensors):
    metric = cz.metrics.RetrievalMetrics(metrics, normalize=normalize)
    for _ in range(2):  # the second time after a reset
        metric.reset()
        for part, judged in zip(shards(tensors, 3, 0), (None, judgements, None), strict=True):
            metric.update(**part, judgements=judged)
    return {name: x.item() for name, x in metric.compute().items()}


def test_collected_batches_have_the_bits_of_the_whole(worlds):
    same_for_every_split(collected, 2, worlds)


def in_favour(levels, grade, number, runs=Levels.runs):
    """Of items with equal scores the relevant ones come first."""
    relevant = np.bincount(levels.of_group, weights=number * (grade > 0), minlength=len(levels.query))
    return runs(levels._replace(tied=relevant.astype(np.int64)), grade, number)


@pytest.mark.parametrize(
    ("place", "mistake"),
    [
        ("search.scores_of", lambda a, b, normalize: similarities(a, b)),  # ties are equal in every bit only
        ("ranking.Levels.runs", in_favour),
        ("task.Evaluation.finds_by_id", False),  # a query finds itself by another name
        ("task.first_of_each", lambda ids, world: torch.ones_like(ids, dtype=torch.bool)),  # repeated samples count
    ],
)
def test_a_mistake_on_one_process_is_caught(place, mistake, monkeypatch):
    monkeypatch.setattr(f"contrastive_zoo.metrics.{place}", mistake)
    with pytest.raises(AssertionError):
        test_awkward_inputs_have_the_metrics_of_a_plain_computation()


def local_queries(**arguments):
    with suppress(ValueError):  # a rank of too few items, or of judgements of others
        return cz.metrics.evaluate(**arguments, process_group=cz.World())


def mean_of_means(**arguments):
    def means(values, world):
        of_rank = torch.from_numpy(np.array([np.nanmean([0.0, *x]) for x in values.values()]))
        dist.all_reduce(of_rank)
        return dict(zip(values, (of_rank / world.size).tolist(), strict=True))

    with patch.object(measurement, "means_over_ranks", means):
        return cz.metrics.evaluate(**arguments)


@pytest.mark.parametrize("mutant", [local_queries, mean_of_means])
def test_a_mistake_on_several_ranks_is_caught(mutant, worlds):
    with pytest.raises(AssertionError):
        same_for_every_split(mutant, 2, worlds)


ROWS, IDS = torch.ones(4, 4), torch.arange(4)

FAULTS = {
    "evaluate": ("metrics.measurement.nearest_ranking", partial(cz.metrics.evaluate, ROWS, labels=IDS % 2)),
    "top_k": ("metrics.search.ordered", partial(cz.metrics.top_k, ROWS, k=1)),
    "mine_hard_negatives": ("data.mining.scores_of", partial(cz.data.mine_hard_negatives, ROWS, None, IDS)),
}


def of_a_fault(caller, without=nullcontext):
    place, call = FAULTS[caller]
    fault = patch(f"contrastive_zoo.{place}", side_effect=MemoryError("no memory"))
    group = dist.new_group([0, 1])
    if without is not nullcontext:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1.0), group)
    with without(), fault if dist.get_rank() == 1 else nullcontext():
        return error_message(lambda: call(process_group=group), (MemoryError, cz.CommunicationError))


def test_other_ranks_hear_of_a_fault_at_once(worlds):
    for caller in FAULTS:
        other, failed = worlds.run(2, of_a_fault, caller)
        assert failed == "no memory"
        assert_says(other, f"rank 0 waited in … Rank 1 failed in {caller}: MemoryError: no memory.")


def test_a_fault_that_is_not_reported_is_heard_of_late(worlds):
    def silently():
        return patch("contrastive_zoo.metrics.search.reported", nullcontext)

    other, _ = worlds.run(2, of_a_fault, "top_k", silently)
    assert "not all ranks came" in other


def test_means_of_queries_are_the_metrics(worlds):
    draw = torch.Generator().manual_seed(0)
    rows, labels = torch.randn(60, 4, generator=draw), torch.randint(5, (60,), generator=draw)
    labels[::7] = 100 + torch.arange(9)  # no item is relevant
    settings = {"metrics": ["recall@3", "map"]}
    whole = cz.metrics.evaluate(rows, labels=labels, reduction="none", **settings)
    assert all(x.isnan().equal(labels >= 100) for x in whole.values())
    expected = {name: x.nanmean().item() for name, x in whole.items()}
    assert cz.metrics.evaluate(rows, labels=labels, **settings) == pytest.approx(expected, abs=1e-12)

    each = list(zip(*(x.split([40, 0, 20]) for x in (rows, labels)), strict=True))
    results = worlds.run(3, lambda x, y: cz.metrics.evaluate(x, labels=y, reduction="none", **settings), each=each)
    for name, x in whole.items():
        assert torch.equal(torch.cat([found[name] for found in results]).nan_to_num(-1), x.nan_to_num(-1))


COLLECTED = numbers(40, 8, seed=0), torch.arange(40) % 6


def test_ir_measures_and_torchmetrics_agree_but_where_it_is_said():
    retrieval = pytest.importorskip("torchmetrics.retrieval")
    draw = torch.Generator().manual_seed(3)
    scores, (n, m) = torch.rand(20, 40, generator=draw).double(), (20, 40)
    rows = torch.cat([scores, torch.ones(n, 1)], 1), torch.cat([torch.eye(m), torch.zeros(m, 1)], 1).double()
    grades = torch.randint(1, 4, (n, m), generator=draw) * (torch.rand(n, m, generator=draw) < 0.2)
    grades[:, 0] = 1  # every query has a relevant item
    query, item = grades.nonzero(as_tuple=True)
    theirs = {
        "precision@5": (ir_measures.P @ 5, retrieval.RetrievalPrecision(top_k=5)),
        "recall@10": (ir_measures.R @ 10, retrieval.RetrievalRecall(top_k=10)),
        "r_precision": (ir_measures.Rprec, retrieval.RetrievalRPrecision()),
        "map": (ir_measures.AP, retrieval.RetrievalMAP()),
        "map@10": (ir_measures.AP @ 10, retrieval.RetrievalMAP(top_k=10)),
        "mrr": (ir_measures.RR, retrieval.RetrievalMRR()),
        "ndcg": (ir_measures.nDCG, None),
        "ndcg@10": (ir_measures.nDCG @ 10, retrieval.RetrievalNormalizedDCG(top_k=10)),
        "hit_rate@3": (ir_measures.Success @ 3, retrieval.RetrievalHitRate(top_k=3)),
    }
    found = cz.metrics.evaluate(*rows, judgements=(query, item, grades[query, item].double()), ids=torch.arange(n),
                                gallery_ids=torch.arange(m), metrics=list(theirs), normalize=False)  # fmt: skip
    qrels = {str(i): {str(j): x for j, x in enumerate(row) if x} for i, row in enumerate(grades.tolist())}
    run = {str(i): {str(j): score for j, score in enumerate(row)} for i, row in enumerate(scores.tolist())}
    expected = ir_measures.calc_aggregate([x for x, _ in theirs.values()], qrels, run)
    assert found == pytest.approx({name: expected[x] for name, (x, _) in theirs.items()}, abs=1e-12)
    which = torch.arange(n).repeat_interleave(m)
    for name, (_, metric) in theirs.items():
        if metric is not None:
            target = grades if name.startswith("ndcg") else grades > 0
            value = metric(scores.float().flatten(), target.flatten(), indexes=which).item()
            # its map@k is a mean over those among the first k only
            assert found[name] < value if name == "map@10" else found[name] == pytest.approx(value, abs=1e-6), name


def test_a_batch_that_is_refused_leaves_nothing_behind():
    rows, labels = COLLECTED
    metric = cz.metrics.RetrievalMetrics("map")
    metric.update(rows[:20], labels[:20])
    state = {name: [x.clone() for x in batches] for name, batches in metric.batches.items()}
    uneven = labels[:3], labels[:3], torch.ones(2)
    refusals = {
        "no metric recall@r": lambda: cz.metrics.RetrievalMetrics(["map", "recall@r"]),
        "one per row, got 5 for 20 rows": lambda: metric.update(rows[20:], labels[:5]),
        "one integer per row": lambda: metric.update(rows[20:], labels[20:].float()),
        "as wide as those of earlier batches": lambda: metric.update(rows[20:, :3], labels[20:]),
        "gallery_labels belong to a gallery": lambda: metric.update(rows[20:], labels[20:], gallery_labels=labels[20:]),
        "of one width and dtype, got float64 [8] and": lambda: metric.update(rows[0], labels[20:]),
        "[j], got int64 [3], int64 [3], float32 [2]": lambda: metric.update(rows[20:], judgements=uneven),
        "three tensors, got 3": lambda: metric.update(rows[20:], judgements=3),
    }
    for says, update in refusals.items():
        assert says in str(error_message(update)), says
        assert {name: len(batches) for name, batches in metric.batches.items()} == dict.fromkeys(state, 1)
        assert all(torch.equal(metric.batches[name][0], x) for name, (x,) in state.items())
    metric.update(rows[20:], labels[20:])
    assert metric.compute().item() == cz.metrics.evaluate(rows, labels=labels, metrics=["map"])["map"]


def test_numbers_have_one_dtype_also_on_a_rank_that_has_collected_none(worlds):
    """Integer grades and narrow labels came from the data set; an empty shard has neither."""
    rows, labels = COLLECTED

    def job(rank):
        judged, labelled, nothing = map(cz.metrics.RetrievalMetrics, ("ndcg", "map", "map"))
        if rank == 1:
            ids = torch.arange(40)
            judged.update(rows.float(), ids=ids, judgements=(ids, ids.roll(1), labels + 1))
            labelled.update(rows, labels.to(torch.int32))
        says = str(error_message(nothing.compute))
        return judged.compute().item(), labelled.compute().item(), says

    ((expected,), *found) = worlds.run(1, job, each=[(1,)]), *worlds.run(3, job, each=[(0,), (1,), (2,)])
    assert found == [expected] * 3
    assert expected[1] == cz.metrics.evaluate(rows, labels=labels, metrics=["map"])["map"]
    assert "before any update()" in expected[2]
