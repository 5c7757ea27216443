"""Every metric against enumeration by hand, with ties, and against other libraries, without."""

import math

import ir_measures
import numpy as np
import pytest
import torch
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from sklearn.metrics import top_k_accuracy_score

import contrastive_zoo as cz
from contrastive_zoo.metrics.exact import prepared
from contrastive_zoo.metrics.ranking import Ranking
from contrastive_zoo.metrics.ranking_metrics import Metric
from tests.evaluation import by_hand

NAMES = ["precision@1", "precision@3", "recall@2", "recall@5", "hit_rate@1", "hit_rate@3", "r_precision"]
NAMES += ["map", "map@3", "map@r", "mrr", "mrr@2", "ndcg", "ndcg@3"]
TIES = ["pessimistic", "optimistic", "expected"]


def random_rows(n, m, seed, classes=6):
    draw = torch.Generator().manual_seed(seed)
    rows = (torch.randn(size, 8, generator=draw, dtype=torch.float64) for size in (n, m))
    labels = (torch.randint(classes, (size,), generator=draw) for size in (n, m))
    return *rows, *labels


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_neighbors_vote(k, ties):
    a, b = by_hand.few_scores(40, 30, k)
    draw = torch.Generator().manual_seed(k)
    labels, other = (torch.randint(4, (n,), generator=draw) for n in (40, 30))
    settings = {"metrics": [f"knn_accuracy@{k}"], "ties": ties, "normalize": False}
    found = cz.metrics.evaluate(a, b, labels=labels, gallery_labels=other, **settings)
    assert found[f"knn_accuracy@{k}"] == pytest.approx(by_hand.knn_accuracy(a @ b.T, other, labels, k, ties))
    found = cz.metrics.evaluate(a, labels=labels, **settings)
    others = (a @ a.T).fill_diagonal_(-math.inf)
    assert found[f"knn_accuracy@{k}"] == pytest.approx(by_hand.knn_accuracy(others, labels, labels, k, ties))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("longest", [1.0, 1e4])
def test_a_collapsed_encoder_is_not_good(dtype, longest):
    draw = torch.Generator().manual_seed(0)
    direction, lengths = torch.randn(40, generator=draw), longest ** torch.rand(90, 1, generator=draw)
    rows, labels = direction.to(dtype) * lengths.to(dtype), torch.arange(90) % 3
    names = ["hit_rate@1", "precision@10", "map", "mrr", "knn_accuracy@5"]
    worst, mean = (cz.metrics.evaluate(rows, labels=labels, metrics=names, ties=x) for x in ("pessimistic", "expected"))
    assert worst["hit_rate@1"] == worst["precision@10"] == 0.0
    assert mean["hit_rate@1"] == mean["precision@10"] == pytest.approx(29 / 89)
    assert worst["mrr"] == pytest.approx(1 / 61)
    assert worst["knn_accuracy@5"] == 0.0  # two other classes have more items


@pytest.mark.parametrize("k", [1, 2, 5, 30])
def test_recall_is_the_hit_rate_of_partners_and_of_labels(k):
    a, b = by_hand.few_scores(37, 37, k)
    (_, _, labels, other), partner = random_rows(37, 37, k, classes=9), torch.eye(37)
    by_label = {"labels": labels, "gallery_labels": other}
    others = (labels[:, None] == labels).double().fill_diagonal_(math.nan)
    for gallery, settings, grades in ((b, {}, partner), (b, by_label, (labels[:, None] == other).double()),
                                      (None, {"labels": labels}, others)):  # fmt: skip
        found = cz.metrics.recall_at_k(a, gallery, k=k, normalize=False, **settings)
        scores = a @ (a if gallery is None else gallery).T
        assert found == pytest.approx(by_hand.metric(f"hit_rate@{k}", scores, grades), abs=1e-12)


def test_length_matters_only_without_normalize():
    queries, gallery = torch.eye(2), torch.tensor([[1.0, 0.0], [30.0, 31.0]])
    assert cz.metrics.recall_at_k(queries, gallery) == 1.0
    assert cz.metrics.recall_at_k(queries, gallery, normalize=False) == 0.5


def test_ignored_labels_and_repeated_ids_do_not_count():
    a, _, labels, _ = random_rows(40, 0, 0)
    settings = {"metrics": [*NAMES, "knn_accuracy@3"]}
    ignored = labels == 2
    expected = cz.metrics.evaluate(a[~ignored], labels=labels[~ignored], **settings)
    assert cz.metrics.evaluate(a, labels=labels, ignore_label=2, **settings) == expected
    padded = torch.cat([torch.arange(40), torch.arange(7)])
    again = cz.metrics.evaluate(a[padded], labels=labels[padded], ids=padded, ignore_label=2, **settings)
    assert again == expected
    assert cz.metrics.evaluate(a[padded], labels=labels[padded], ignore_label=2, **settings) != expected


def test_no_number_where_no_row_counts():
    rows, labels = torch.eye(3), torch.zeros(3, dtype=torch.int64)
    found = cz.metrics.evaluate(rows, labels=labels, ignore_label=0, metrics=["map", "r_precision"])
    assert all(math.isnan(x) for x in found.values())
    with pytest.raises(ValueError, match="between 1 and the 0 rows to search in, got 1"):
        cz.metrics.evaluate(rows, labels=labels, ignore_label=0, metrics=["recall@1"])
    with pytest.raises(ValueError, match="between 1 and the 0 rows to search in, got 1"):
        cz.metrics.top_k(rows[:0], k=1)


def test_a_ranking_of_items_is_that_of_the_metrics():
    scores, grades = torch.tensor([0.9, 0.5, 0.5, 0.1, 0.5]), torch.tensor([0.0, 1.0, 0.0, 2.0, 1.0])
    ranking = Ranking.of_items(scores, grades)
    for name in NAMES:
        for ties in TIES:
            found = Metric.of(name).values(ranking, ties).item()
            expected = by_hand.metric(name, scores[None], grades[None], ties)
            assert found == pytest.approx(expected, abs=1e-12), (name, ties)


# -------------------------------------------------------------------------------------------------- other libraries


def test_pytorch_metric_learning_agrees():
    a, b, labels, other = random_rows(60, 90, 1)
    names = {"precision_at_1": "precision@1", "r_precision": "r_precision", "mean_average_precision_at_r": "map@r",
             "mean_average_precision": "map", "mean_reciprocal_rank": "mrr"}  # fmt: skip
    for rows, of_rows in ((a, labels), (b, other)):
        given = {"labels": labels} if rows is a else {"gallery": b, "labels": labels, "gallery_labels": other}
        calculator = AccuracyCalculator(include=tuple(names), k=len(rows) - (rows is a), device=torch.device("cpu"))
        unit, unit_rows = (prepared(x, normalize=True) for x in (a, rows))
        expected = calculator.get_accuracy(unit, labels, unit_rows, of_rows, ref_includes_query=rows is a)
        found = cz.metrics.evaluate(a, **given, metrics=list(names.values()))
        reciprocal = expected.pop("mean_reciprocal_rank")
        assert found["mrr"] == pytest.approx(reciprocal, abs=1e-6)  # computed in float32 there
        assert {x: found[names[x]] for x in expected} == pytest.approx(expected, abs=1e-12)


def test_ir_measures_agrees():
    draw = torch.Generator().manual_seed(3)
    a, b, *_ = random_rows(20, 40, 3)
    grades = torch.randint(0, 4, (20, 40), generator=draw) * (torch.rand(20, 40, generator=draw) < 0.2)
    query, item = grades.nonzero(as_tuple=True)
    names = {"precision@5": ir_measures.P @ 5, "recall@10": ir_measures.R @ 10, "r_precision": ir_measures.Rprec,
             "map": ir_measures.AP, "map@10": ir_measures.AP @ 10, "mrr": ir_measures.RR, "ndcg": ir_measures.nDCG,
             "ndcg@10": ir_measures.nDCG @ 10, "hit_rate@3": ir_measures.Success @ 3}  # fmt: skip
    found = cz.metrics.evaluate(a, b, judgements=(query, item, grades[query, item].double()), ids=torch.arange(20),
                        gallery_ids=torch.arange(40), metrics=list(names), normalize=False)  # fmt: skip
    qrels = {str(i): {} for i in query.tolist()}
    for i, j in zip(query.tolist(), item.tolist(), strict=True):
        qrels[str(i)][str(j)] = int(grades[i, j])
    scores = (a @ b.T).tolist()
    run = {i: {str(j): score for j, score in enumerate(scores[int(i)])} for i in qrels}
    expected = ir_measures.calc_aggregate(list(names.values()), qrels, run)
    assert found == pytest.approx({x: expected[y] for x, y in names.items()}, abs=1e-12)


def test_cross_modal_recall_is_top_k_accuracy():
    a, b, *_ = random_rows(40, 40, 6)
    b = a + b
    found = cz.metrics.cross_modal_recall(a, b, k=[1, 5], normalize=False)
    for k in (1, 5):
        for name, scores in (("first_to_second", a @ b.T), ("second_to_first", b @ a.T)):
            assert found[f"{name}@{k}"] == pytest.approx(top_k_accuracy_score(np.arange(40), scores.numpy(), k=k))
