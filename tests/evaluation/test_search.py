"""The nearest rows are those of one process for every split; a mistake is one error on all ranks."""

import math
import sys
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

import contrastive_zoo as cz
from contrastive_zoo.metrics.exact import prepared
from contrastive_zoo.metrics.search import Gallery
from tests.helpers import numbers, rank, refused

pytestmark = pytest.mark.data

DRAW = torch.Generator().manual_seed(0)
TIES = [torch.randint(-1, 2, (n, 3), generator=DRAW).double() for n in (47, 47)]
# float32 cannot tell near ties apart
NEAR_TIES = torch.ones(47, 16, dtype=torch.float64) + 1e-9 * torch.randn(47, 16, generator=DRAW, dtype=torch.float64)
MANY, FEW = torch.randn(2000, 8, generator=DRAW), torch.randn(60, 8, generator=DRAW)
MANY[1000:1200] = MANY[:200]  # ties on different ranks
SEARCHES = {
    "ties": (*TIES, {"k": 5}),
    "ties among themselves": (TIES[0], None, {"k": 5}),
    "near ties": (NEAR_TIES, None, {"k": 5}),
    "dot products": (FEW, MANY, {"k": 30, "normalize": False}),
    "dot products beyond float32": (FEW * 1e25, MANY * 1e25, {"k": 30, "normalize": False}),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_the_nearest_rows_are_those_of_one_process(name, worlds):
    rows, other, settings = SEARCHES[name]
    n, gallery = len(rows), rows if other is None else other
    excluded = torch.stack([torch.arange(n).roll(3), torch.full((n,), -1)], 1)

    def search(queries, excluded, gallery):
        with torch.device("meta"):  # the user's default device
            return tuple(cz.metrics.top_k(queries, None if other is None else gallery, excluded=excluded, **settings))

    scores, indices = search(rows, excluded, gallery)
    unit = partial(F.normalize, dim=1) if settings.get("normalize", True) else lambda x: x
    expected = unit(rows.double()) @ unit(gallery.double()).T
    tolerance = {"rtol": 0, "atol": 1e-7 * expected.abs().max().item()}
    expected[torch.arange(n), excluded[:, 0]] = -math.inf
    if other is None:
        expected.fill_diagonal_(-math.inf)
    assert torch.allclose(scores, expected.sort(descending=True).values[:, : settings["k"]], **tolerance)
    assert torch.allclose(scores, expected.gather(1, indices), **tolerance)
    assert not ((scores[:, 1:] == scores[:, :-1]) & (indices[:, 1:] < indices[:, :-1])).any()
    for cuts, of_gallery in (((0.5,), (0,)), ((0, 0.9), (0.1, 0.1)), ((0.2, 0.2, 0.7), (0.3, 0.5, 0.9))):
        parts = (x.tensor_split([int(len(x) * y) for y in at]) for x, at in
                 ((rows, cuts), (excluded, cuts), (gallery, cuts if other is None else of_gallery)))  # fmt: skip
        found = worlds.run(len(cuts) + 1, search, each=list(zip(*parts, strict=True)))
        assert all(map(torch.equal, map(torch.cat, zip(*found, strict=True)), (scores, indices)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_cosines_are_ties_in_metrics_search_and_mining(dtype):
    """Rounding differs between embeddings of one direction and other lengths; ties are ordered by index."""
    direction = torch.tensor([[0.1, 0.2, 0.7]], dtype=dtype)
    lengths = torch.rand(40, 1, generator=torch.Generator().manual_seed(0)).to(dtype) + 0.5
    corpus, queries, places = direction * lengths, direction * 3, torch.arange(40)
    assert torch.equal(cz.metrics.top_k(queries, corpus, k=40).indices, places[None])
    mined = cz.data.mine_hard_negatives(queries, corpus, places[-1:], num_negatives=39, absolute_margin=0.0)
    assert mined["negative"].tolist() == places[:-1].tolist()
    labels = {"labels": places[:1], "gallery_labels": places}
    assert cz.metrics.evaluate(queries, corpus, metrics=["hit_rate@39"], **labels) == {"hit_rate@39": 0.0}


def test_elements_that_float32_does_not_hold_are_compared_in_float64():
    """Below 2^-126 faiss sees zeros: nothing may be certain then."""
    rows = numbers(50, 4, seed=0) * 1e-45
    queries = numbers(5, 4, seed=1) * 1e37
    scores = (queries * 1e-37) @ (rows * 1e45).T
    assert torch.equal(cz.metrics.top_k(queries, rows, k=3, normalize=False).indices, scores.topk(3).indices)


def test_a_rank_compares_its_share_of_the_candidates():
    halves = [Gallery(half, True) for half in MANY.split(1000)]
    unit, nothing = prepared(FEW, normalize=True), torch.empty(60, 0, dtype=torch.int64)
    proposals = [half.proposals(unit, 30, nothing) for half in halves]
    floor = torch.cat([x.reached(30) for x in proposals], 1).topk(30).values[:, -1:]
    found = [half.top(unit, 30, nothing, x, floor) for half, x in zip(halves, proposals, strict=True)]
    compared = sum((scores > -math.inf).sum().item() for scores, _, _ in found)
    assert 60 * 30 <= compared <= 60 * 30 + 6


ROWS = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
NAN = ROWS.masked_fill(ROWS > 2, math.nan)
NESTED = torch.nested.nested_tensor([ROWS[0], ROWS[1, :2]], layout=torch.jagged)
PLACES = torch.arange(30)
CALLS = {
    "evaluate": lambda queries, gallery, **of: cz.metrics.evaluate(queries, gallery, **of),
    "top_k": lambda queries, gallery, **_: cz.metrics.top_k(queries, gallery, k=1),
    "mine_hard_negatives": lambda queries, gallery, **_: cz.data.mine_hard_negatives(queries, gallery, PLACES),
    "RetrievalMetrics": lambda queries, gallery, **of: of_metrics(queries, gallery, **of),
}


def of_metrics(queries, gallery, **of):
    metrics = cz.metrics.RetrievalMetrics()
    metrics.update(queries, gallery=gallery, **of)
    return metrics.compute()


LABELLED = {"labels": PLACES % 5, "gallery_labels": PLACES % 5}


@pytest.mark.parametrize("caller", [*CALLS])
def test_a_gallery_that_is_the_queries_a_nan_and_a_nested_tensor_are_refused_with_a_fix(caller):
    call = CALLS[caller]
    for same in (ROWS, ROWS[:], ROWS.detach()):
        finds_itself = rf"^{caller}: .* each query finds itself\. (Leave out gallery|Pass corpus=None)"
        with pytest.raises(ValueError, match=finds_itself):
            call(ROWS, same, **LABELLED)
    with pytest.raises(ValueError, match=r"leave these rows out: \w+\[\w+\.isfinite\(\).*\]\.$") as error:
        call(ROWS, NAN, **LABELLED)
    assert "check_finite" not in str(error.value)
    for rows in ((NESTED, ROWS), (ROWS, NESTED)):
        with pytest.raises(ValueError, match=rf"^{caller}: .* Pass \w+\.to_padded_tensor\(0\.0\)\.$"):
            call(*rows, **LABELLED)


def without_faiss():
    with patch.dict(sys.modules, {"faiss": None} if rank() else {}):
        return top_k(ONES, OTHERS, k=1)


ONES, OTHERS, LARGE = torch.ones(3, 2), torch.ones(3, 2), torch.ones(3, 2).double()
IDS = torch.arange(3)
JUDGED = {"ids": IDS, "judgements": (IDS * 0, IDS * 0, torch.ones(3))}


def evaluate_judgements():
    ids, item = IDS + 3 * rank(), IDS[:1] + 9
    return cz.metrics.evaluate(ONES, ids=ids, judgements=(ids[:1], item, torch.ones(1)))


evaluate, top_k = cz.metrics.evaluate, cz.metrics.top_k
MISTAKES: dict[str, Callable[[], object]] = {
    "1 and the 6 rows … got 7": lambda: evaluate(ONES, OTHERS, metrics=["recall@7"]),
    "1 and the 5 rows": lambda: evaluate(ONES, labels=IDS, metrics=["hit_rate@6"]),
    "rank 1 … pip install 'contrastive_zoo[faiss]'": without_faiss,
    "metrics … recall@2": lambda: evaluate(ONES, OTHERS, metrics=[f"recall@{1 + rank()}"]),
    "rank 1 … NaN": lambda: evaluate(ONES * (math.nan if rank() else 1), labels=IDS),
    "gallery … NaN": lambda: top_k(ONES, ONES * (math.nan if rank() else 1), k=1),
    "width of queries … d=3": lambda: evaluate(torch.ones(3, 2 + rank()), labels=IDS),
    "one width … [3, 4]": lambda: evaluate(ONES, torch.ones(3, 4)),
    "labels": lambda: evaluate(ONES, OTHERS, **({} if rank() else {"labels": IDS, "gallery_labels": IDS})),
    "come together": lambda: evaluate(ONES, OTHERS, labels=IDS),
    "one per row, got 4 for 3 rows": lambda: evaluate(ONES, labels=torch.arange(4)),
    "rank 1 … query 3": lambda: evaluate(ONES, ids=IDS, judgements=(IDS + 2 * rank(), IDS, torch.ones(3))),
    "2 of  … gallery_ids": evaluate_judgements,
    "6 queries … 5 rows": lambda: evaluate(ONES, OTHERS[rank() :]),
    "no metric recall … recall@k": lambda: evaluate(ONES, labels=IDS, metrics=["recall"]),
    "a pair twice": lambda: evaluate(ONES, **JUDGED),
    "3 queries": lambda: top_k(ONES, OTHERS, k=1, excluded=IDS[:2, None]),
    "queries must be below … got 1e+154": lambda: evaluate(LARGE * 1e154, labels=IDS, normalize=False),
    "norms overflow": lambda: evaluate(LARGE * 1.5e308, labels=IDS),
    "grades must be at most 1e+300": lambda: evaluate(ONES, ids=IDS, judgements=(IDS, IDS, IDS.double() * 5e307)),
    "k is an integer … got [1, 2]": lambda: top_k(ONES, OTHERS, k=[1, 2]),
    "0 rows": lambda: top_k(ONES, ONES[:0], k=1),
    "every rank brought the very same … Lightning": lambda: evaluate(ROWS, labels=PLACES % 5),
} | {
    f"{caller}: every rank brought the very same … cz.World()": lambda call=call: call(ROWS + rank(), ROWS, **LABELLED)
    for caller, call in CALLS.items()
}


def test_a_mistake_is_one_error_on_every_rank(worlds):
    for words, bad in MISTAKES.items():
        refused(worlds, 2, bad, words)


def test_ids_accept_the_whole_set_on_every_rank(worlds):
    of = {"labels": PLACES % 5, "metrics": ["map"]}
    assert worlds.run(2, partial(evaluate, ROWS, ids=PLACES, **of)) == [evaluate(ROWS, **of)] * 2
    assert worlds.run(2, partial(evaluate, ONES[:1], labels=IDS[:1], metrics=["map"])) == [{"map": 1.0}] * 2
