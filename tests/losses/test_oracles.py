"""Formulas that nobody here wrote: those of sentence-transformers, lightly and open_clip, where they are ours.

Value and gradient in float64, on classes of unequal size, equal embeddings and equal similarities. For
pytorch-metric-learning see ``tests/adapters/test_native.py``.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pytorch_metric_learning import losses as pml
from sentence_transformers.sentence_transformer import losses as st
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

import contrastive_zoo as cz
from contrastive_zoo.losses.compositions import Matryoshka
from contrastive_zoo.losses.mnrl import GIST, MNRL
from contrastive_zoo.losses.triplet import Triplet
from tests.helpers import assert_same, numbers
from tools.peer_losses import packages

SEEDS = range(3)


def rows(*shape: int, seed: int) -> Tensor:
    """Two of them equal, two of them opposite, the rest random."""
    z = numbers(*shape, seed=seed)
    z[1], z[3] = z[0], -z[2]
    return z.requires_grad_()


def classes(seed: int, smallest: int = 1) -> Tensor:
    """Of sizes 5, 3, 2, and the smallest, in any order; the equal embeddings are of one class for even seeds."""
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
        again = [0, 0, 2, 2, *range(4, len(labels))]  # which of equal embeddings is the hardest one is anybody's choice
        z = numbers(len(labels), 4, seed=seed).requires_grad_()
        assert_same(
            lambda z, y, rows=again: ours(z[rows], y),
            lambda z, y, rows=again: labelled(theirs)(z[rows], y),
            z,
            labels,
            tolerance=1e-7,  # theirs is √(a² − 2ab + b²)
        )


# -------------------------------------------------------------------------------------------------- lightly, open_clip


def unit(*views: Tensor) -> list[Tensor]:
    """Normalise, as open_clip's models do before the loss."""
    return [F.normalize(view, dim=1) for view in views]


def same(ours: Any, *settings: float) -> Callable[[Any], Any]:
    """Compare our loss with a peer that takes views; or unit embeddings, and these settings."""
    return lambda cls: ((lambda *views: cls()(*unit(*views), *settings)) if settings else cls(), ours)


def both_directions(cls: Any) -> Any:
    """Compare the sum of both views' predictions of the other one."""
    loss = cz.NegativeCosine()
    return (
        lambda a, b: cls()(a, b.detach()) + cls()(b, a.detach()),
        lambda a, b: loss(a, b) + loss(b, a),
    )


def frossl(cls: Any) -> Any:
    """Compare with the peer's loss of a list of views."""
    return lambda *views: cls()(list(views)), cz.FroSSL()


def swav(cls: Any) -> Any:
    """Apply the prototypes, which are a layer before the peer's loss."""
    prototypes = rows(9, 4, seed=99).detach()
    crops, (c,) = cls(), unit(prototypes)

    def theirs(*views: Tensor) -> Tensor:
        scores = [z @ c.T for z in unit(*views)]
        return crops(scores[:2], scores[2:]).squeeze()

    loss = cz.SwAV(len(prototypes), 4).double()
    loss.prototypes.data.copy_(prototypes)
    return theirs, loss


def dino(cls: Any) -> Any:
    """Compare after a step that changed the centre; the first two views have a student and a teacher output."""
    t = 2**-5  # theirs rounds it to 32 bits
    losses = cls(output_dim=4, teacher_temp=t).double(), cz.DINO(4, teacher_temperature=t).double()
    teacher = [rows(9, 4, seed=98).detach(), rows(9, 4, seed=97).detach()]

    return (
        lambda *views: losses[0](teacher, list(views)),
        lambda *views: losses[1](torch.stack(views, 1), torch.stack(teacher, 1)),
    )


def distilled(cls: Any) -> Any:
    """Return the sum of the two values that the peer returns."""
    teacher = [rows(9, 4, seed=98).detach(), rows(9, 4, seed=97).detach()]

    loss = cz.ClipDistillation(temperature=0.2, teacher_temperature=0.1)
    return (
        lambda *views: sum(cls()(*unit(*views), 5.0, *unit(*teacher), 10.0)),
        lambda *views: 2 * loss(*views, *teacher),
    )


def one_view(ours: Callable[..., Tensor], theirs: Callable[..., Tensor]) -> Any:
    return lambda *views: sum(theirs(x) for x in views), lambda *views: sum(ours(x) for x in views)


def tico(cls: Any) -> Any:
    """Compare the second step, whose covariance holds the first one's."""
    losses = cz.TiCo(4).double(), cls()
    for loss in losses:
        loss(rows(9, 4, seed=98).detach(), rows(9, 4, seed=97).detach())
    return lambda *views: losses[1](*views, update_covariance_matrix=False), losses[0].eval()


def in_64_bits(theirs: Any, ours: cz.SIGReg) -> None:
    """Give the peer's SIGReg the directions of ours, and the constants that it rounds to 32 bits."""
    drawn = torch.nn.functional.normalize(ours.directions().double(), dim=0)
    theirs._generate_unit_vectors = lambda *_: drawn
    t = torch.linspace(0, 3, 17, dtype=torch.float64)
    theirs.t, theirs.phi = t, (-t.square() / 2).exp()
    theirs.weights = theirs.phi * torch.tensor([1.0, *[2.0] * 15, 1.0], dtype=torch.float64) * (3 / 16)


def sigreg(cls: Any) -> Any:
    theirs, ours = cls(num_vectors=64), cz.SIGReg(4, num_slices=64).eval()
    in_64_bits(theirs, ours)
    return one_view(ours, theirs)


def lejepa(cls: Any) -> Any:
    """Compare with the same directions; the first two views are global."""
    theirs, ours = cls(lambda_param=0.3, sigreg_num_vectors=64), cz.LeJEPA(4, lambda_=0.3, num_slices=64).eval()
    in_64_bits(theirs.sigreg, ours)

    return lambda *views: theirs(global_proj=torch.stack(views[:2]), local_proj=torch.stack(views[2:])), ours


def mmcr(cls: Any) -> Any:
    """Normalise before the peer's loss, and leave out the smoothing of ours."""
    return lambda *views: cls(lmda=0.5)(*torch.stack(unit(*views), 1).chunk(2, 1)), cz.MMCR(lambda_=0.5, eps=1e-24)


PEERS: list[tuple[str, str, Callable[[Any], Any], int]] = [
    ("lightly.loss.ntx_ent_loss", "NTXentLoss", same(cz.NTXent(temperature=0.5)), 2),
    ("lightly.loss.dcl_loss", "DCLLoss", same(cz.DCL(temperature=0.1)), 2),
    ("lightly.loss.dcl_loss", "DCLWLoss", same(cz.DCLW(temperature=0.1)), 2),
    ("lightly.loss.barlow_twins_loss", "BarlowTwinsLoss", same(cz.BarlowTwins(lambda_=5e-3)), 2),
    ("lightly.loss.vicreg_loss", "VICRegLoss", same(cz.VICReg()), 2),
    ("lightly.loss.hypersphere_loss", "HypersphereLoss", same(cz.AlignUniform(t=1.0)), 2),
    ("lightly.loss.negative_cosine_similarity", "NegativeCosineSimilarity", both_directions, 2),
    ("lightly.loss.tico_loss", "TiCoLoss", tico, 2),
    ("lightly.loss.frossl_loss", "FroSSLLoss", frossl, 3),
    ("lightly.loss.lejepa_loss", "SIGReg", sigreg, 2),
    ("lightly.loss.lejepa_loss", "LeJEPALoss", lejepa, 3),
    ("lightly.loss.mmcr_loss", "MMCRLoss", mmcr, 4),
    ("lightly.loss.swav_loss", "SwaVLoss", swav, 3),
    ("lightly.loss.dino_loss", "DINOLoss", dino, 3),
    ("open_clip.loss", "ClipLoss", same(cz.Clip(temperature=0.2), 5.0), 2),
    ("open_clip.loss", "SigLipLoss", same(cz.SigLIP(temperature=0.2, logit_bias=-3.0), 5.0, -3.0), 2),
    ("open_clip.loss", "DistillClipLoss", distilled, 2),
]
"""The module, the class, both losses as a function of the class, theirs first, and the number of views."""


@pytest.mark.filterwarnings("ignore")  # of theirs: DCLWLoss copies a tensor in a way that torch advises against
@pytest.mark.parametrize(("module", "name", "pair", "views"), PEERS, ids=lambda x: x if isinstance(x, str) else "")
def test_losses_of_lightly_and_open_clip(module: str, name: str, pair: Callable[[Any], Any], views: int) -> None:
    package = module.partition(".")[0]
    if not (packages.FOLDER / package).exists():
        pytest.skip(f"{package} is not in {packages.FOLDER.relative_to(packages.ROOT)}; `make test` installs it")
    theirs, ours = pair(getattr(packages.loaded(module), name))
    for seed in SEEDS:
        assert_same(ours, theirs, *(rows(9, 4, seed=10 * seed + view) for view in range(views)))


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
