"""Metrics are those of other libraries where scores have no ties, and recall is the hit rate."""

import ir_measures
import numpy as np
import pytest
import torch
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from sklearn.metrics import top_k_accuracy_score

import contrastive_zoo as cz
from contrastive_zoo.metrics.exact import prepared


def random_rows(n, m, seed):
    draw = torch.Generator().manual_seed(seed)
    rows = (torch.randn(size, 8, generator=draw, dtype=torch.float64) for size in (n, m))
    return *rows, *(torch.randint(6, (size,), generator=draw) for size in (n, m))


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
        assert found.pop("mrr") == pytest.approx(expected.pop("mean_reciprocal_rank"), abs=1e-6)  # float32 there
        assert found == pytest.approx({names[x]: expected[x] for x in expected}, abs=1e-12)


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


def test_recall_is_the_hit_rate_and_top_k_accuracy():
    a, b, labels, other = random_rows(40, 40, 6)
    b = a + b
    of = {"labels": labels, "gallery_labels": other, "normalize": False}
    assert (
        cz.metrics.recall_at_k(a, b, k=5, **of) == cz.metrics.evaluate(a, b, metrics=["hit_rate@5"], **of)["hit_rate@5"]
    )
    found = cz.metrics.cross_modal_recall(a, b, k=[1, 5], normalize=False)
    for k in (1, 5):
        for name, scores in (("first_to_second", a @ b.T), ("second_to_first", b @ a.T)):
            assert found[f"{name}@{k}"] == pytest.approx(top_k_accuracy_score(np.arange(40), scores.numpy(), k=k))
