"""Losses of annotated pairs and of a teacher's scores: sentence-transformers' code, numbers by hand."""

from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses as pml
from sentence_transformers.sentence_transformer import losses as st
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.losses.annotated_pairs import AnglE, CoSENT, OnlineContrastive
from contrastive_zoo.losses.class_softmax import P2SGrad
from contrastive_zoo.losses.distillation import MarginMSE, ScoreDistillation
from contrastive_zoo.losses.pair_margins import IntraPairVariance
from contrastive_zoo.losses.triplet import MegaBatchMargin
from contrastive_zoo.losses.uniformity import OrthogonalRegularization
from tests.helpers import assert_same, close, numbers
from tests.losses import zoo_softmax

SEEDS = range(3)


def rows(count: int, n: int = 9, d: int = 4, seed: int = 0) -> list[Tensor]:
    return [numbers(n, d, seed=7 * seed + i).requires_grad_() for i in range(count)]


def peer(cls: Any, **settings: Any) -> nn.Module:
    """A loss of sentence-transformers without a model: it is given the embeddings."""
    return cls(nn.Identity(), **settings)


SCORES = torch.tensor([0.1, 0.9, 0.5, 0.5, 0.5, 0.0, 1.0, 0.3, 0.9], dtype=torch.float64)
BINARY = torch.tensor([1, 0, 0, 1, 1, 0, 1, 0, 1])


ANNOTATED = [
    (CoSENT(), peer(st.CoSENTLoss), SCORES),
    (CoSENT(temperature=0.5), peer(st.CoSENTLoss, scale=2.0), SCORES),
    (AnglE(), peer(st.AnglELoss), SCORES),
    (OnlineContrastive(), peer(st.OnlineContrastiveLoss), BINARY),
    (OnlineContrastive(margin=1.2), peer(st.OnlineContrastiveLoss, margin=1.2), BINARY),
    (OnlineContrastive(), peer(st.OnlineContrastiveLoss), torch.ones_like(BINARY)),
    (OnlineContrastive(margin=2.0), peer(st.OnlineContrastiveLoss, margin=2.0), torch.zeros_like(BINARY)),
    (OnlineContrastive(margin=2.0), peer(st.OnlineContrastiveLoss, margin=2.0), torch.tensor([1, *[0] * 8])),
    (OnlineContrastive(margin=2.0), peer(st.OnlineContrastiveLoss, margin=2.0), torch.tensor([0, *[1] * 8])),
]


@pytest.mark.parametrize(("ours", "theirs", "y"), ANNOTATED)
def test_annotated_pairs_are_sentence_transformers(ours: Any, theirs: Any, y: Tensor) -> None:
    for seed in SEEDS:
        q, k = rows(2, d=4 + seed % 2, seed=seed)
        assert_same(lambda a, b: ours(a, b, y), lambda a, b: theirs.compute_loss_from_embeddings([a, b], y), q, k)


@pytest.mark.parametrize("seed", SEEDS)
def test_hinges_and_teachers_are_sentence_transformers(seed: int) -> None:
    q, p, first, second = rows(4, seed=seed)
    mega = peer(st.MegaBatchMarginLoss, use_mini_batched_version=False)
    assert_same(MegaBatchMargin(), lambda a, b: mega.calculate_loss([[a], [b]]), q, p)
    y = numbers(9, 3, seed=90 + seed)
    margin, divergence = peer(st.MarginMSELoss), peer(st.DistillKLDivLoss, temperature=0.5)
    assert_same(
        lambda q, p, *n: MarginMSE()(q, p, torch.stack(n, 1), y[:, :1] - y[:, 1:]),
        lambda *x: margin.compute_loss_from_embeddings(list(x), y),
        q, p, first, second,
    )  # fmt: skip
    assert_same(
        lambda q, *c: ScoreDistillation(temperature=0.5, teacher_temperature=0.5)(q, torch.stack(c, 1), y),
        lambda *x: divergence.compute_loss_from_embeddings(list(x), y),
        q, p, first, second,
    )  # fmt: skip
    regularised = peer(st.GlobalOrthogonalRegularizationLoss)
    assert_same(
        OrthogonalRegularization(), lambda z: sum(regularised.compute_loss_from_embeddings([z]).values()), first
    )  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
def test_variances_and_cosines_are_pytorch_metric_learnings(seed: int) -> None:
    (z,) = rows(1, seed=seed)
    labels = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 3])
    assert_same(lambda z: IntraPairVariance()(z, labels), lambda z: pml.IntraPairVarianceLoss()(z, labels), z)
    ours, theirs = P2SGrad(5, 4).double(), pml.P2SGradLoss(4, 5).double()
    unit = nn.functional.normalize(ours.weights.data, dim=1)
    ours.weights.data, theirs.weight.data = unit, unit.T.clone()
    # it rescales its weights in two steps, the first of which adds 1e-7
    torch.testing.assert_close(ours(z, labels), theirs(z, labels), rtol=1e-6, atol=1e-6)


def test_all_views_of_a_sample_are_anchors() -> None:
    views = rows(3, n=4)
    assert_same(
        zoo_softmax.SupConOfViews(contrast_mode="all", temperature=0.2),
        lambda *x: zoo_softmax.dense_sup_con_of_views(*x, temperature=0.2, contrast_mode="all"),
        *views,
    )


def test_numbers_by_hand() -> None:
    eye = torch.eye(2, dtype=torch.float64)
    mean = OnlineContrastive(reduction="mean")(eye, eye[[0, 0]], torch.tensor([1, 1]))  # of 0 and 1 > ½: 1² alone
    close(mean, torch.tensor(1.0).double())
    each = OnlineContrastive(reduction="none")(eye, eye[[0, 0]], torch.tensor([1, 0]))
    close(each, torch.zeros(2).double())


BAD = [
    (lambda q, k: CoSENT()(q, k, torch.ones(3)), "scores are one number per pair, got float32"),
    (lambda q, k: CoSENT()(q, k[:2], torch.ones(9)), "row i is one pair"),
    (lambda q, k: OnlineContrastive()(q, k, torch.full((9,), 2)), "labels are 1 for a positive pair and 0"),
    (lambda q, k: cz.SupCon()(q, BINARY, torch.ones(9, 9)), "labels or by a mask, got both"),
    (
        lambda q, k: cz.SupCon()(q, mask=torch.ones(9, 8)),
        "a column for each of the 9 samples of all ranks, got float32",
    ),
    (lambda q, k: cz.SupCon()(q, mask=torch.ones(8, 9)), "the mask has a row for each local sample"),
    (lambda q, k: cz.SupCon()(q), "labels are missing"),
    (lambda q, k: MegaBatchMargin()(q, k[:2]), "views must pair row by row"),
    (lambda q, k: MarginMSE()(q, k, q, torch.ones(9, 1)), r"negatives are k >= 1 rows per query, \[n, k, d\]"),
    (lambda q, k: MarginMSE()(q, k, k[:, None], torch.ones(9, 2)), "margins are one number per negative"),
    (lambda q, k: ScoreDistillation()(q, k[:, None], torch.ones(9, 1)), "candidates are k >= 2 rows per query"),
    (lambda q, k: ScoreDistillation()(q, torch.stack([k, k], 1), torch.ones(9)), "scores are one number per candidate"),
]


@pytest.mark.parametrize(("call", "text"), BAD)
def test_bad_input_is_named(call: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call(*rows(2))
