"""Recall by faiss against recall by counting."""

import math
import sys

import pytest
import torch
import torch.nn.functional as F

from contrastive_zoo.metrics import recall_at_k


def by_counting(similarity, relevant, candidate, k):
    """A query is a hit if fewer than k irrelevant rows are as near as its nearest relevant one."""
    best = similarity.masked_fill(~relevant, -math.inf).amax(1, keepdim=True)
    rivals = ((similarity >= best) & candidate & ~relevant).sum(1)
    counted = relevant.any(1)
    return (rivals < k)[counted].float().mean().item()


@pytest.mark.parametrize("k", [1, 2, 5, 30])
@pytest.mark.parametrize("kind", ["distinct", "many ties"])
def test_recall_is_what_counting_gives(k, kind):
    draw = torch.Generator().manual_seed(k)
    for _ in range(20):
        if kind == "distinct":
            a, b = (torch.randn(n, 8, generator=draw) for n in (37, 37))
        else:  # small whole numbers: many exact ties, many duplicates, and no rounding
            a, b = (torch.randint(-1, 2, (n, 3), generator=draw).float() for n in (37, 37))
        similarity, everyone = a @ b.T, torch.ones(37, 37, dtype=torch.bool)
        labels, gallery_labels = (torch.randint(0, 9, (37,), generator=draw) for _ in range(2))
        settings = {"k": k, "normalize": False}

        partner = torch.eye(37, dtype=torch.bool)
        assert recall_at_k(a, b, **settings) == pytest.approx(by_counting(similarity, partner, everyone, k))

        same = labels[:, None] == gallery_labels
        got = recall_at_k(a, b, labels=labels, gallery_labels=gallery_labels, **settings)
        # a query without a relevant row does not count
        assert got == pytest.approx(by_counting(similarity, same, everyone, k))

        others = ~partner
        got = recall_at_k(a, labels=labels, **settings)
        assert got == pytest.approx(by_counting(a @ a.T, (labels[:, None] == labels) & others, others, k))


def test_a_row_never_finds_itself_even_among_its_duplicates():
    rows = F.normalize(torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.1, 1.0]]), dim=1)
    assert recall_at_k(rows, labels=torch.tensor([0, 0, 0, 1, 1])) == 1.0
    assert recall_at_k(rows, labels=torch.tensor([0, 1, 2, 0, 2])) == 0.0  # the duplicates have other labels


def test_a_constant_embedding_finds_nothing():
    assert recall_at_k(torch.ones(50, 4), torch.ones(50, 4), k=49) == 0.0
    assert recall_at_k(torch.ones(50, 4), torch.ones(50, 4), k=50) == 1.0


def test_the_order_of_the_gallery_does_not_matter():
    a = torch.randint(-1, 2, (40, 3), generator=torch.Generator().manual_seed(0)).float()
    labels, order = torch.arange(40) % 4, torch.randperm(40, generator=torch.Generator().manual_seed(1))
    got = [recall_at_k(a, b, labels=labels, gallery_labels=c) for b, c in ((a, labels), (a[order], labels[order]))]
    assert got[0] == got[1]


def test_length_matters_only_without_normalize():
    queries, gallery = torch.eye(2), torch.tensor([[1.0, 0.0], [30.0, 31.0]])
    assert recall_at_k(queries, gallery) == 1.0
    assert recall_at_k(queries, gallery, normalize=False) == 0.5


def test_a_label_that_nobody_shares_does_not_count():
    rows = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]])
    assert recall_at_k(rows, labels=torch.tensor([0, 0, 1])) == 1.0
    assert math.isnan(recall_at_k(rows, labels=torch.tensor([0, 1, 2])))


@pytest.mark.parametrize(
    ("arguments", "settings", "says"),
    [
        (
            (torch.ones(3, 2), torch.ones(3, 4)),
            {},
            r"one width and dtype, got float32 \[3, 2\] and float32 \[3, 4\]",
        ),
        ((torch.ones(3, 2), torch.ones(4, 2)), {}, "row i of the gallery is query i's partner"),
        ((torch.ones(3, 2),), {}, "need labels"),
        ((torch.ones(3, 2), torch.ones(3, 2)), {"labels": torch.arange(3)}, "come together"),
        ((torch.ones(3, 2),), {"labels": torch.arange(4)}, "one per row, got 4 for 3 rows"),
        ((torch.ones(3, 2), torch.ones(3, 2)), {"k": 4}, "between 1 and the 3 rows"),
        ((torch.ones(3, 2),), {"labels": torch.arange(3), "k": 3}, "between 1 and the 2 rows"),
        ((torch.full((3, 2), math.nan), torch.ones(3, 2)), {}, "NaN or infinite"),
    ],
)
def test_mistakes_are_named(arguments, settings, says):
    with pytest.raises(ValueError, match=says):
        recall_at_k(*arguments, **settings)


def test_without_faiss_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ValueError, match=r"pip install contrastive_zoo\[faiss\]"):
        recall_at_k(torch.eye(2), torch.eye(2))
