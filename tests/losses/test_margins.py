"""Losses of margins: pytorch-metric-learning's and torch's functions, and numbers by hand."""

import contextlib
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from pytorch_metric_learning import distances, losses, reducers
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.engine.pairwise import distances as euclidean
from contrastive_zoo.engine.pairwise import squared_distances
from contrastive_zoo.losses.pair_margins import (
    Contrastive,
    Margin,
    ThresholdConsistentMargin,
)
from contrastive_zoo.losses.ranking import PNP, FastAP, SmoothAP
from contrastive_zoo.losses.soft_margins import Circle, GeneralizedLiftedStructure
from contrastive_zoo.losses.triplet import Angular, Triplet
from tests.helpers import EXACT, assert_same


def rows(n: int, d: int = 5, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, dtype=torch.float64, generator=generator).requires_grad_()


# ------------------------------------------------------------------------------------------------------- peers' own

SQUARED = distances.LpDistance(power=2)
PEERS: dict[str, tuple[Any, Any]] = {
    "contrastive, squared": (Contrastive(metric="squared distance"), losses.ContrastiveLoss(distance=SQUARED)),
    "triplet, squared": (
        Triplet(margin=0.2, metric="squared distance"),
        losses.TripletMarginLoss(0.2, distance=SQUARED),
    ),
    "circle, all": (Circle(m=0.25, gamma=4), losses.CircleLoss(0.25, 4, reducer=reducers.MeanReducer())),
    "generalised lifted": (GeneralizedLiftedStructure(), losses.GeneralizedLiftedStructureLoss()),
    "generalised lifted, cosine": (
        GeneralizedLiftedStructure(pos_margin=0.8, neg_margin=0.2, metric="similarity"),
        losses.GeneralizedLiftedStructureLoss(0.2, 0.8, distance=distances.CosineSimilarity()),
    ),
    "angular": (Angular(), losses.AngularLoss()),
    "threshold-consistent": (ThresholdConsistentMargin(), losses.ThresholdConsistentMarginLoss()),
    **{
        f"PNP, {variant}": (
            PNP(variant=variant, temperature=0.1, with_self=True),
            losses.PNPLoss(variant=variant, anneal=0.1),
        )
        for variant in losses.PNPLoss.VARIANTS
    },
}


@pytest.mark.parametrize("odd", ["uneven classes", "duplicates"])
@pytest.mark.parametrize("name", PEERS)
def test_pytorch_metric_learning_agrees(name: str, odd: str) -> None:
    ours, theirs = (x.double() for x in PEERS[name])
    labels = torch.tensor([0, 0, 1, 1, 1, 4, 4, 4, 4, 1, 8, 8, 8, 8, 8])
    alike = [0, 0, 2, 2] if odd == "duplicates" else [0, 1, 2, 3]  # equal embeddings of a class
    tolerance = 1e-8 if "circle" in name else EXACT  # theirs cuts softplus off at 20

    def unit(z: Tensor) -> Tensor:
        return F.normalize(z, dim=1)[[*alike, *range(4, 15)]]  # AngularLoss takes negatives as they come

    z = rows(15, seed=2)
    assert_same(lambda z: ours(unit(z), labels), lambda z: theirs(unit(z), labels), z, tolerance=tolerance)


def test_smooth_ap_of_four_blocks_of_four_is_pytorch_metric_learning_s() -> None:
    labels = torch.arange(4).repeat_interleave(4)  # it mistakes samples per class for classes
    ours, theirs = SmoothAP(temperature=0.1, with_self=True), losses.SmoothAPLoss(temperature=0.1).double()
    torch.set_default_dtype(torch.float64)
    try:
        assert_same(lambda z: ours(z, labels), lambda z: theirs(z, labels), rows(16))
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_histogram_is_of_unit_rows() -> None:
    with pytest.raises(ValueError, match="unit rows"):
        FastAP(normalize=False)


@pytest.mark.parametrize("dense", [False, True], ids=["blocks", "dense"])
@pytest.mark.parametrize("learnt", [True, False], ids=["learnt", "fixed"])
@pytest.mark.parametrize("active", ["none", "one anchor's", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_margin_of_classes_is_pytorch_metric_learnings(
    dtype: torch.dtype, active: str, learnt: bool, dense: bool
) -> None:
    """With no active pair the mean is 0; with one, all anchors' ν β are over it."""
    angles = {
        "none": [0.0, 0.0, math.pi, math.pi],
        "one anchor's": [0.0, 0.0, 1.4, math.pi],
        "all": [0.0, 2.0, 0.5, 1.5],
    }
    angle = torch.tensor(angles[active], dtype=torch.float64)
    z = torch.stack([angle.cos(), angle.sin()], 1).to(dtype).requires_grad_()
    y = torch.tensor([0, 0, 1, 1]) if active != "one anchor's" else torch.tensor([0, 0, 1, 2])
    settings = {"beta": 1.25, "nu": 0.1, "num_classes": 3, "learn_beta": learnt}
    ours, theirs = Margin(**settings).to(dtype), losses.MarginLoss(**settings).to(dtype)
    with cz.engine.plain_formulas() if dense else contextlib.nullcontext():
        found = ours(z, y)
    expected = theirs(z, y)
    assert (expected.item() == 0) == (active == "none")
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0, "atol": 1e-10}
    torch.testing.assert_close(found, expected, **close)
    gradients = [torch.autograd.grad(x, z, retain_graph=True)[0] for x in (found, expected)]
    torch.testing.assert_close(*gradients, **close)
    if learnt:
        of_beta = torch.autograd.grad(found, ours.beta)[0]
        wanted = torch.autograd.grad(expected, theirs.beta, allow_unused=True)[0]
        torch.testing.assert_close(of_beta, torch.zeros_like(of_beta) if wanted is None else wanted, **close)


# --------------------------------------------------------------------------------------------------------- distances


@given(seed=st.integers(0, 99), n=st.integers(1, 40), d=st.integers(1, 6))
def test_distances_are_torch_s(seed: int, n: int, d: int) -> None:
    a, b = rows(n, d, seed), rows(7, d, seed + 1)
    expected = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")
    torch.testing.assert_close(euclidean(a, b), expected, rtol=1e-9, atol=1e-7)
    torch.testing.assert_close(squared_distances(a, b), expected.square(), rtol=1e-9, atol=1e-10)
    assert torch.equal(euclidean(a, a).diagonal(), torch.zeros(n, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(euclidean(a, a).sum(), a)
    assert gradient.isfinite().all()
