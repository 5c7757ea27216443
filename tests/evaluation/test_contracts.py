"""Outputs keep their bounds on inputs that are drawn to break them, and each check can fail."""

from contextlib import nullcontext
from datetime import timedelta
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

import contrastive_zoo as cz
from contrastive_zoo.metrics import local_search
from contrastive_zoo.metrics.ranking import Groups, Levels, Ranking
from contrastive_zoo.metrics.ranking_metrics import _AT_CUTOFF
from contrastive_zoo.ranks.messages import CommunicationError
from tests.evaluation.awkward import awkward, metrics_by_hand
from tests.helpers import EVERY_CASE, error_message

CASES = range(2000 if EVERY_CASE else 32)


def test_awkward_inputs_have_the_metrics_of_a_plain_computation():
    for seed in CASES:
        arguments, scores, grades = awkward(seed)
        expected = metrics_by_hand(arguments, scores, grades)
        assert cz.metrics.evaluate(**arguments) == pytest.approx(expected, abs=1e-12, nan_ok=True), seed


def test_awkward_inputs_have_the_metrics_of_one_process(worlds):
    def on_rank(seeds):
        return [evaluated_in_shards(*awkward(seed)[:1], seed) for seed in seeds]

    seeds = CASES[::16]
    expected = [repr(cz.metrics.evaluate(**awkward(seed)[0])) for seed in seeds]
    assert worlds.run(3, on_rank, seeds) == [expected] * 3


def evaluated_in_shards(arguments, seed):
    """Return the metrics of a case whose queries and gallery are split at random; a rank has the judgements of its ids."""
    rank, size, draw = dist.get_rank(), dist.get_world_size(), torch.Generator().manual_seed(seed)
    rows = {name: len(arguments[name]) for name in ("queries", "gallery") if name in arguments}
    cuts = {name: torch.randint(n + 1, (size - 1,), generator=draw).sort().values.tolist() for name, n in rows.items()}
    parts = {name: slice(*[0, *cuts[name], n][rank : rank + 2]) for name, n in rows.items()}
    local = dict(arguments)
    for name, x in arguments.items():
        if isinstance(x, torch.Tensor):
            local[name] = x[parts["gallery" if name.startswith("gallery") else "queries"]]
    if "judgements" in arguments:
        here = torch.isin(arguments["judgements"][0], local["ids"])
        local["judgements"] = tuple(x[here] for x in arguments["judgements"])
    return repr(cz.metrics.evaluate(**local))


# ------------------------------------------------------------------------------------------------------- mutants


def test_ties_that_are_equal_in_every_bit_only_are_caught(monkeypatch):
    monkeypatch.setattr(local_search, "rounded", lambda scores, bits: scores)
    with pytest.raises(AssertionError):
        test_awkward_inputs_have_the_metrics_of_a_plain_computation()


def test_a_metric_outside_of_its_bounds_is_not_returned(monkeypatch):
    for value in (1.5, -0.1, np.nan):
        monkeypatch.setitem(
            _AT_CUTOFF, "map", lambda ranking, cutoff, ties, value=value: np.full(ranking.queries, value)
        )
        with pytest.raises(AssertionError, match=f"map of a query must be 0 to 1, got {value}"):
            cz.metrics.evaluate(torch.eye(3), labels=torch.zeros(3, dtype=torch.int64), metrics=["map"])


def test_more_relevant_rows_than_there_are_is_refused():
    one, nothing = np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    score, grade = np.ones(1), np.ones(1)
    for tied, total in ((nothing, one), (one, nothing)):
        with pytest.raises(AssertionError, match="more relevant items than there are"):
            Ranking.of(
                Levels(nothing, score, nothing, tied), Groups(nothing, score, grade, one), (nothing, grade, total), 1
            )


# -------------------------------------------------------------------------------------------------------- faults

ROWS, IDS = torch.eye(4), torch.arange(4)
FAULTS = {
    "evaluate": (
        "contrastive_zoo.metrics.measurement.nearest_ranking",
        lambda group: cz.metrics.evaluate(ROWS, labels=IDS % 2, metrics=["precision@1"], process_group=group),
    ),
    "top_k": ("contrastive_zoo.metrics.search.ordered", lambda group: cz.metrics.top_k(ROWS, k=1, process_group=group)),
    "mine_hard_negatives": (
        "contrastive_zoo.data.mining.similarities",
        lambda group: cz.data.mine_hard_negatives(ROWS, ROWS, IDS, num_negatives=1, process_group=group),
    ),
    "RefreshedNegatives": (
        "contrastive_zoo.data.refreshed.random_keys",
        lambda group: cz.data.RefreshedNegatives(
            ROWS.__getitem__,
            ROWS.__getitem__,
            IDS,
            corpus_size=4,
            every=1,
            num_negatives=1,
            sampling="random",
            process_group=group,
        ).update(0),
    ),
}


def of_a_fault(caller, without=nullcontext):
    """Return what each rank raises where rank 1 runs out of memory in the middle of a call."""
    where, call = FAULTS[caller]
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1.0 if without is not nullcontext else 30.0))
    with without(), patch(where, side_effect=MemoryError("no memory")) if dist.get_rank() == 1 else nullcontext():
        return error_message(lambda: call(group), (MemoryError, CommunicationError))


@pytest.mark.parametrize("caller", FAULTS)
def test_other_ranks_hear_of_a_fault_at_once(caller, worlds):
    other, failed = worlds.run(2, of_a_fault, caller, timeout=10.0)
    assert failed == "no memory"
    assert "rank 0 waited in" in other
    assert f"Rank 1 failed in {caller}: MemoryError: no memory." in other


def test_a_fault_that_is_not_reported_is_heard_of_late(worlds):
    def silently():
        return patch("contrastive_zoo.metrics.search.reported", nullcontext)

    other, _ = worlds.run(2, of_a_fault, "top_k", silently, timeout=10.0)
    assert "not all ranks came" in other


# ------------------------------------------------------------------------------------------------- values of queries


def test_means_of_queries_are_the_metrics_and_those_of_groups(worlds):
    draw = torch.Generator().manual_seed(0)
    rows, labels = torch.randn(60, 4, generator=draw), torch.randint(5, (60,), generator=draw)
    settings = {"metrics": ["recall@3", "map", "knn_accuracy@2"], "ignore_label": 4, "ties": "expected"}
    whole = cz.metrics.evaluate_queries(rows, labels=labels, **settings)
    assert all(x.isnan().equal(labels == 4) for x in whole.values())
    expected = {name: x.nanmean().item() for name, x in whole.items()}
    assert cz.metrics.evaluate(rows, labels=labels, **settings) == pytest.approx(expected, abs=1e-12)
    by_class = cz.metrics.mean_by_group(whole["map"], labels)
    assert by_class == pytest.approx(
        {x: whole["map"][labels == x].mean().item() for x in range(5)}, abs=1e-12, nan_ok=True
    )
    index = cz.metrics.ApproximateIndex("Flat")

    def on_rank(rows, labels):
        found = cz.metrics.evaluate_queries(rows, labels=labels, **settings)
        complete = cz.metrics.index_recall(rows, rows, k=3, index=index, groups=labels)
        return found, cz.metrics.mean_by_group(found["map"], labels), complete

    split = [40, 0, 20]
    results = worlds.run(3, on_rank, each=list(zip(rows.split(split), labels.split(split), strict=True)))
    assert all(repr(of_rank) == repr(by_class) for _, of_rank, _ in results)
    assert all(complete == dict.fromkeys(range(5), 1.0) for _, _, complete in results)
    for name, x in whole.items():
        assert torch.equal(torch.cat([found[name] for found, _, _ in results]).nan_to_num(-1), x.nan_to_num(-1))


def test_a_bootstrap_is_paired_and_the_same_for_every_split(worlds):
    draw = torch.Generator().manual_seed(0)
    difficulty, better = torch.rand(400, generator=draw), 0.02 + 0.1 * torch.randn(400, generator=draw)
    first, second = difficulty * 0.6 + 0.2, (difficulty * 0.6 + 0.2 + better).clamp(0, 1)
    first[::7] = second[::7] = torch.nan
    found = cz.metrics.paired_bootstrap(first, second, resamples=2000)
    differences = (second - first)[~first.isnan()].double()
    half = 1.96 * differences.std().item() / len(differences) ** 0.5  # of many queries the mean is normal
    assert found.mean == pytest.approx(differences.mean().item(), abs=1e-12)
    assert (found.mean - found.low, found.high - found.mean) == pytest.approx((half, half), rel=0.1)
    counted = ~first.isnan()
    unpaired = cz.metrics.paired_bootstrap(first[counted], second[counted].roll(70))
    assert unpaired.high - unpaired.low > 2 * (found.high - found.low)

    def on_rank(first, second):
        return cz.metrics.paired_bootstrap(first, second, resamples=2000)

    split = [250, 0, 150]
    each = list(zip(first.split(split), second.split(split), strict=True))
    assert worlds.run(3, on_rank, each=each) == [found] * 3


@pytest.mark.parametrize(
    ("first", "second", "settings", "says"),
    [
        (torch.ones(3), torch.ones(2), {}, "values of the same queries"),
        (torch.ones(3), torch.tensor([1.0, 1.0, np.nan]), {}, "values of the same queries"),
        (torch.ones(3), torch.ones(3) * 2, {}, "second are one number from 0 to 1 per query"),
        (torch.ones(3), torch.ones(3).long(), {}, "second are one number from 0 to 1 per query"),
        (torch.ones(3) * np.nan, torch.ones(3) * np.nan, {}, "no query counts"),
        (torch.ones(3), torch.ones(3), {"confidence": 95}, "confidence is a number between 0 and 1, got 95"),
        (torch.ones(3), torch.ones(3), {"resamples": 0}, "resamples is an integer in 1 … 1000000, got 0"),
        (torch.ones(3), torch.ones(3), {"seed": -1}, "seed is an integer of at least 0, got -1"),
    ],
)
def test_a_bootstrap_refuses_values_that_are_not_paired(first, second, settings, says):
    with pytest.raises(ValueError, match=says):
        cz.metrics.paired_bootstrap(first, second, **settings)
    with pytest.raises(ValueError, match="groups are one per row, got 2 for 3 rows"):
        cz.metrics.mean_by_group(torch.ones(3), torch.ones(2).long())
