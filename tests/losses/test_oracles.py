"""Formulas that nobody here wrote: sentence-transformers' and torch's own, where they are ours.

Value and gradient in float64, on classes of unequal size, equal rows and equal similarities. For
pytorch-metric-learning see ``tests/adapters/test_native.py``; for lightly and open_clip ``benchmarks/oracles.py``.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses as pml
from sentence_transformers.sentence_transformer import losses as st
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

import contrastive_zoo as cz
from contrastive_zoo.losses.compositions import Matryoshka
from contrastive_zoo.losses.mnrl import GIST, MNRL
from contrastive_zoo.losses.triplet import Triplet
from tests.helpers import assert_same, numbers

SEEDS = range(3)


def rows(*shape: int, seed: int) -> Tensor:
    """Two of them equal, two of them opposite, the rest random."""
    z = numbers(*shape, seed=seed)
    z[1], z[3] = z[0], -z[2]
    return z.requires_grad_()


def classes(seed: int, smallest: int = 1) -> Tensor:
    """Of sizes 5, 3, 2, and the smallest, in any order; the equal rows are of one class for even seeds."""
    labels = torch.tensor([0] * 5 + [1] * 3 + [2] * 2 + [7] * smallest)
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))]
    if seed % 2 == 0:
        other = int((labels == labels[0]).nonzero()[-1])
        labels[[1, other]] = labels[[other, 1]]
    return labels


# ----------------------------------------------------------------------------------------------- sentence-transformers


class Wordless(PreTrainedTokenizerBase):
    def __init__(self) -> None:
        pass

    def get_vocab(self) -> dict[str, int]:
        return {}


class EvaluationInputs(nn.Module):
    """What a SentenceTransformer is to its losses, for embeddings that are there already."""

    tokenizer, max_seq_length = Wordless(), 1

    def __init__(self, column: str = "student") -> None:
        super().__init__()
        self.column = column

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features[self.column]}

    def __getitem__(self, _: int) -> nn.Module:
        return self

    def get_embedding_dimension(self) -> int:
        return 6


def called(loss: nn.Module) -> Callable[..., Tensor]:
    """Each argument is a column of texts."""
    return lambda *columns: loss([{"student": x} for x in columns], torch.empty(0))


def labelled(loss: nn.Module) -> Callable[..., Tensor]:
    return lambda z, labels: loss([{"student": z}], labels)


ALL = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
DIRECTIONS: list[tuple[tuple[str, ...], str]] = [
    (ALL[:1], "joint"),
    (ALL[:2], "joint"),
    (ALL, "joint"),
    (("query_to_doc", "doc_to_query"), "per_direction"),
]


@pytest.mark.parametrize("mined", [0, 1, 2], ids="{} negatives a query".format)
@pytest.mark.parametrize("hardness", [None, "in_batch_negatives", "hard_negatives", "all_negatives"])
@pytest.mark.parametrize(("directions", "partition"), DIRECTIONS, ids=str)
def test_multiple_negatives_ranking(directions: Any, partition: Any, hardness: Any, mined: int) -> None:
    settings = {"directions": directions, "partition_mode": partition, "hardness_mode": hardness}
    settings["hardness_strength"] = 3.0 if hardness else 0.0
    theirs = called(st.MultipleNegativesRankingLoss(EvaluationInputs(), scale=5.0, **settings))
    loss = MNRL(temperature=0.2, **settings)

    def ours(q: Tensor, d: Tensor, *negatives: Tensor) -> Tensor:
        value: Tensor = loss(q, d, torch.cat(negatives), torch.arange(len(q)).repeat(mined)) if mined else loss(q, d)
        return value

    for seed in SEEDS:
        columns = [rows(7, 4, seed=10 * seed + k) for k in range(2 + mined)]
        columns[1].data[:2] = columns[0].data[1:3]  # documents that are other queries
        assert_same(ours, theirs, *columns)


def test_multiple_negatives_ranking_in_chunks() -> None:
    theirs = st.CachedMultipleNegativesRankingLoss(EvaluationInputs(), scale=5.0, mini_batch_size=3)
    columns = [rows(7, 4, seed=k) for k in range(3)]

    def ours(q: Tensor, d: Tensor, x: Tensor) -> Tensor:
        value: Tensor = MNRL(temperature=0.2)(q, d, x, torch.arange(7))
        return value

    assert_same(ours, lambda *x: theirs.calculate_loss([list(y.split(3)) for y in x]), *columns)


@pytest.mark.parametrize("strategy", ["absolute", "relative"])
@pytest.mark.parametrize("margin", [0.0, 0.2])
@pytest.mark.parametrize("contrast", list(itertools.product([True, False], repeat=2)), ids=str)
def test_gist(strategy: Any, margin: float, contrast: tuple[bool, bool]) -> None:
    settings = {"temperature": 0.1, "margin_strategy": strategy, "margin": margin}
    settings |= {"contrast_anchors": contrast[0], "contrast_positives": contrast[1]}
    theirs, ours = st.GISTEmbedLoss(EvaluationInputs(), EvaluationInputs("guide"), **settings), GIST(**settings)
    for seed, columns in itertools.product(SEEDS, (2, 3)):
        guide = [numbers(7, 3, seed=100 + seed + k) for k in range(columns)]

        def in_columns(*students: Tensor, guide: list[Tensor] = guide) -> Tensor:
            features = [{"student": x, "guide": y} for x, y in zip(students, guide, strict=True)]
            value: Tensor = theirs(features, torch.empty(0))
            return value

        def in_order(a: Tensor, p: Tensor, *x: Tensor, guide: list[Tensor] = guide) -> Tensor:
            value: Tensor = ours(a, p, guide[0], guide[1], *x, *guide[2:])
            return value

        assert_same(in_order, in_columns, *(rows(7, 4, seed=10 * seed + k) for k in range(columns)))


@pytest.mark.parametrize("weights", [None, [0.5, 1.0, 2.0]])
def test_matryoshka(weights: list[float] | None) -> None:
    model = EvaluationInputs()
    inner = st.MultipleNegativesRankingLoss(model, scale=5.0)
    theirs = called(st.MatryoshkaLoss(model, inner, matryoshka_dims=[6, 4, 2], matryoshka_weights=weights))
    ours = Matryoshka(MNRL(temperature=0.2), (6, 4, 2), weights=weights)
    for seed in SEEDS:
        assert_same(ours, theirs, rows(7, 6, seed=seed), rows(7, 6, seed=seed + 10))


NO_SINGLETON = 2
"""An anchor without a positive: sentence-transformers counts its nearest negative against a distance of 0, we do not."""
COSINE = st.BatchHardTripletLossDistanceFunction.cosine_distance
BATCHWISE: dict[str, tuple[Any, Any, int]] = {
    "all": (Triplet(margin=1.0, normalize=False), st.BatchAllTripletLoss(EvaluationInputs(), margin=1.0), 1),
    "all, cosine": (
        Triplet(margin=0.5, metric="similarity"),
        st.BatchAllTripletLoss(EvaluationInputs(), margin=0.5, distance_metric=COSINE),
        1,
    ),
    "hard": (
        Triplet(margin=1.0, mining="hard", average="all", normalize=False),
        st.BatchHardTripletLoss(EvaluationInputs(), margin=1.0),
        NO_SINGLETON,
    ),
    "hard, cosine": (
        Triplet(margin=0.2, mining="hard", average="all", metric="similarity"),
        st.BatchHardTripletLoss(EvaluationInputs(), margin=0.2, distance_metric=COSINE),
        NO_SINGLETON,
    ),
    "hard, soft": (
        Triplet(margin=0.0, mining="hard", soft=True, average="all", normalize=False),
        st.BatchHardSoftMarginTripletLoss(EvaluationInputs()),
        NO_SINGLETON,
    ),
}


@pytest.mark.parametrize("name", BATCHWISE)
def test_triplets_of_a_batch(name: str) -> None:
    ours, theirs, smallest = BATCHWISE[name]
    for seed in SEEDS:
        labels = classes(seed, smallest)
        again = [0, 0, 2, 2, *range(4, len(labels))]  # which of equal rows is the hardest one is anybody's choice
        z = numbers(len(labels), 4, seed=seed).requires_grad_()
        assert_same(
            lambda z, y, rows=again: ours(z[rows], y),
            lambda z, y, rows=again: labelled(theirs)(z[rows], y),
            z,
            labels,
            tolerance=1e-7,  # theirs is √(a² − 2ab + b²)
        )


# ----------------------------------------------------------------------------------------------------------- a mutant


def test_a_slip_is_seen() -> None:
    """One settings apart, one pair too many, a sum for a mean."""
    a, b, y = rows(11, 4, seed=0), rows(11, 4, seed=10), classes(0)
    theirs = called(st.MultipleNegativesRankingLoss(EvaluationInputs(), scale=5.0))
    slips: list[tuple[Any, Any, tuple[Tensor, ...]]] = [
        (MNRL(temperature=0.2, normalize=False), theirs, (a, b)),
        (MNRL(temperature=0.2, directions=ALL[:2]), theirs, (a, b)),
        (Triplet(margin=1.0, average="all", normalize=False), labelled(BATCHWISE["all"][1]), (a, y)),
        (Triplet(margin=1.0, mining="hard", average="all", normalize=False), labelled(BATCHWISE["hard"][1]), (a, y)),
        (cz.InfoNCE(temperature=0.1), pml.SelfSupervisedLoss(pml.NTXentLoss(temperature=0.1)), (a, b)),
    ]
    for ours, other, rows_of_both in slips:
        with pytest.raises(AssertionError):
            assert_same(ours, other, *rows_of_both, tolerance=1e-7)
