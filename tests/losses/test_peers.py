"""Formulas of other people: those of sentence-transformers, lightly, open_clip and pytorch-metric-learning."""

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.nn.functional as F
from pytorch_metric_learning import losses as pml
from sentence_transformers.sentence_transformer import losses as st
from sentence_transformers.sparse_encoder import losses as sparse
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

import contrastive_zoo as cz
from tests.helpers import EXACT, assert_same, drawn, numbers, peer

pytestmark = pytest.mark.peers

SEEDS = range(3)
Loss = Callable[..., Tensor]


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


def unit(*views: Tensor) -> list[Tensor]:
    return [F.normalize(view, dim=1) for view in views]


class Peer(NamedTuple):
    make: Callable[[Tensor], tuple[Loss, Loss]]
    views: int = 1  # how many tensors of embeddings both take
    labels: Callable[[int], Tensor] = classes  # of a seed
    tolerance: float = EXACT


class EvaluationInputs(nn.Module):
    """What a SentenceTransformer is to its losses, for embeddings that are there already."""

    tokenizer, max_seq_length = MagicMock(spec=PreTrainedTokenizerBase), 1

    def __init__(self, column: str = "student") -> None:
        super().__init__()
        self.column = column

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features[self.column]}

    def __getitem__(self, _: int) -> nn.Module:
        return self

    def get_embedding_dimension(self) -> int:
        return 6


def called(loss: nn.Module) -> Loss:
    return lambda *columns: loss([{"student": x} for x in columns], torch.empty(0))


ALL = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
DIRECTIONS = [(ALL[:1], "joint"), (ALL[:2], "joint"), (ALL, "joint"), ((ALL[0], ALL[2]), "per_direction")]
HARDNESS = [None, "in_batch_negatives", "hard_negatives", "all_negatives"]
GUIDES = drawn(["absolute", "relative"], [0.0, 0.2], [True, False], [True, False], one_in=2)


@pytest.mark.parametrize(("direction", "hardness", "mined"), drawn(DIRECTIONS, HARDNESS, [0, 1, 2], one_in=2))
def test_multiple_negatives_ranking(direction: Any, hardness: Any, mined: int) -> None:
    settings = {"directions": direction[0], "partition_mode": direction[1], "hardness_mode": hardness}
    settings["hardness_strength"] = 3.0 if hardness else 0.0
    theirs = called(st.MultipleNegativesRankingLoss(EvaluationInputs(), scale=5.0, **settings))
    loss = cz.MNRL(temperature=0.2, **settings)

    def ours(q: Tensor, d: Tensor, *negatives: Tensor) -> Tensor:
        return loss(q, d, torch.cat(negatives), torch.arange(len(q)).repeat(mined)) if mined else loss(q, d)

    for seed in SEEDS:
        columns = [rows(7, 4, seed=10 * seed + k) for k in range(2 + mined)]
        columns[1].data[:2] = columns[0].data[1:3]  # documents that are other queries
        assert_same(ours, theirs, *columns)


@pytest.mark.parametrize(("strategy", "margin", "anchors", "positives"), GUIDES)
def test_gist(strategy: Any, margin: float, anchors: bool, positives: bool) -> None:
    settings = {"temperature": 0.1, "margin_strategy": strategy, "margin": margin}
    settings |= {"contrast_anchors": anchors, "contrast_positives": positives}
    theirs, ours = st.GISTEmbedLoss(EvaluationInputs(), EvaluationInputs("guide"), **settings), cz.GIST(**settings)
    for seed, columns in ((seed, columns) for seed in SEEDS for columns in (2, 3)):
        guide = [numbers(7, 3, seed=100 + seed + k) for k in range(columns)]

        def in_columns(*students: Tensor, guide: list[Tensor] = guide) -> Tensor:
            features = [{"student": x, "guide": y} for x, y in zip(students, guide, strict=True)]
            return theirs(features, torch.empty(0))

        def in_order(a: Tensor, p: Tensor, *x: Tensor, guide: list[Tensor] = guide) -> Tensor:
            return ours(a, p, guide[0], guide[1], *x, *guide[2:])

        assert_same(in_order, in_columns, *(rows(7, 4, seed=10 * seed + k) for k in range(columns)))


def annotated(ours: Any, theirs: Any, y: Callable[[Tensor], Tensor], **settings: Any) -> Peer:
    """Compare losses of pairs with scores or labels, which are made of classes."""
    of_pairs = theirs(nn.Identity(), **settings).compute_loss_from_embeddings
    return Peer(lambda labels: (lambda a, b: ours(a, b, y(labels)), lambda a, b: of_pairs([a, b], y(labels))), 2)


def as_signs(labels: Tensor) -> Tensor:
    return (labels > 0).long()


def mega_batch(labels: Tensor) -> tuple[Loss, Loss]:
    theirs = st.MegaBatchMarginLoss(nn.Identity(), use_mini_batched_version=False)
    apart = numbers(len(labels), 4, seed=91)  # of equally hard keys ours shares the gradient
    return lambda a, b: cz.MegaBatchMargin()(a, b + apart), lambda a, b: theirs.calculate_loss([[a], [b + apart]])


def of_teacher(ours: Loss, theirs: nn.Module, labels: Tensor) -> tuple[Loss, Loss]:
    """Compare losses of a teacher's scores, of candidates that are columns there and one tensor here."""
    y = numbers(len(labels), 3, seed=90)
    return lambda *x: ours(y, *x), lambda *x: theirs.compute_loss_from_embeddings(list(x), y)


def margin_mse(y: Tensor, q: Tensor, p: Tensor, *n: Tensor) -> Tensor:
    return cz.MarginMSE()(q, p, torch.stack(n, 1), y[:, :1] - y[:, 1:])


def divergence(y: Tensor, q: Tensor, *candidates: Tensor) -> Tensor:
    loss = cz.ScoreDistillation(temperature=0.5, teacher_temperature=0.5)
    return loss(q, torch.stack(candidates, 1), y)


def orthogonal(labels: Tensor) -> tuple[Loss, Loss]:
    theirs = st.GlobalOrthogonalRegularizationLoss(nn.Identity())
    return cz.OrthogonalRegularization(), lambda z: sum(theirs.compute_loss_from_embeddings([z]).values())


def splade(_: Tensor) -> tuple[Loss, Loss]:
    """Compare embeddings as sparse encoders make them, without a sign."""
    model = EvaluationInputs()
    inner = sparse.SparseMultipleNegativesRankingLoss(model, scale=2.0)
    theirs = called(sparse.SpladeLoss(model, inner, document_regularizer_weight=0.3, query_regularizer_weight=0.5))
    flops = cz.FLOPS(query_weight=0.5, document_weight=0.3)
    ours = cz.WeightedSum([cz.MNRL(temperature=0.5, normalize=False), flops])
    return lambda *x: ours(*map(torch.relu, x)), lambda *x: sum(theirs(*map(torch.relu, x)).values())


OF_TEXTS: dict[str, Peer] = {
    "CoSENT": annotated(cz.CoSENT(), st.CoSENTLoss, torch.Tensor.double),
    "AnglE": annotated(cz.CoSENT(similarity="angle"), st.AnglELoss, torch.Tensor.double),
    "OnlineContrastive": annotated(cz.OnlineContrastive(margin=0.5), st.OnlineContrastiveLoss, as_signs, margin=0.5),
    "MegaBatchMargin": Peer(mega_batch, 2),
    "MarginMSE": Peer(partial(of_teacher, margin_mse, st.MarginMSELoss(nn.Identity())), 4),
    "ScoreDistillation": Peer(partial(of_teacher, divergence, st.DistillKLDivLoss(nn.Identity(), temperature=0.5)), 4),
    "OrthogonalRegularization": Peer(orthogonal),
    "SPLADE": Peer(splade, 3),
}


def of_units(ours: Loss, theirs: Loss) -> Peer:
    """Compare losses of unit embeddings, each with a positive: AngularLoss takes negatives as they come."""

    def make(labels: Tensor) -> tuple[Loss, Loss]:
        return lambda z: ours(*unit(z), labels), lambda z: theirs(*unit(z), labels)

    return Peer(make, labels=partial(classes, smallest=2))


def of_weights(cls: Any, kind: Any, labels: Tensor, **settings: Any) -> tuple[Loss, Loss]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # theirs makes tensors from NumPy numbers
        ours, theirs = cls(8, 4, **settings).double(), kind(8, 4, **settings).double()
    (weights,) = theirs.parameters()
    weights.data = ours.weights.data.T.clone()
    return lambda z: ours(z, labels), lambda z: theirs(z, labels)


def in_float64(theirs: Loss) -> Loss:
    """Compute with a peer that makes tensors of the default dtype."""

    def loss(*args: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        try:
            return theirs(*args)
        finally:
            torch.set_default_dtype(torch.float32)

    return loss


OF_ANGLES = {"margin": 3, "scale": 0.5}
SMOOTH_AP = of_units(cz.SmoothAP(temperature=0.1, with_self=True), in_float64(pml.SmoothAPLoss(temperature=0.1)))
OF_METRICS: dict[str, Peer] = {
    "GeneralizedLiftedStructure": of_units(cz.GeneralizedLiftedStructure(), pml.GeneralizedLiftedStructureLoss()),
    "Angular": of_units(cz.Angular(), pml.AngularLoss()),
    "ThresholdConsistentMargin": of_units(cz.ThresholdConsistentMargin(), pml.ThresholdConsistentMarginLoss()),
    # it mistakes samples per class for classes
    "SmoothAP": Peer(SMOOTH_AP.make, labels=lambda seed: torch.arange(4).repeat_interleave(4)),
    "LargeMarginSoftmax": Peer(partial(of_weights, cz.LargeMarginSoftmax, pml.LargeMarginSoftmaxLoss, **OF_ANGLES)),
    "SphereFace": Peer(partial(of_weights, partial(cz.LargeMarginSoftmax, normalize_weights=True), pml.SphereFaceLoss)),
}


def lightly(path: str, ours: Loss, views: int = 2, **settings: Any) -> Peer:
    return Peer(lambda _: (ours, peer(f"lightly.loss.{path}")(**settings)), views)


def swav(_: Tensor) -> tuple[Loss, Loss]:
    theirs, ours = peer("lightly.loss.swav_loss.SwaVLoss")(), cz.SwAV(9, 4).double()
    (prototypes,) = unit(ours.prototypes.detach())

    def of_crops(*views: Tensor) -> Tensor:
        scores = [z @ prototypes.T for z in unit(*views)]
        return theirs(scores[:2], scores[2:]).squeeze()

    return ours, of_crops


def other_views(labels: Tensor) -> list[Tensor]:
    return [rows(len(labels), 4, seed=seed).detach() for seed in (98, 97)]


def dino(labels: Tensor) -> tuple[Loss, Loss]:
    """Compare one step; the first two views have a student and a teacher output."""
    t, teacher = 2**-5, other_views(labels)  # theirs rounds t to 32 bits
    theirs = peer("lightly.loss.dino_loss.DINOLoss")(output_dim=4, teacher_temp=t).double()
    ours = cz.DINO(4, teacher_temperature=t).double()
    return lambda *x: ours(torch.stack(x, 1), torch.stack(teacher, 1)), lambda *x: theirs(teacher, list(x))


def ibot(labels: Tensor) -> tuple[Loss, Loss]:
    """Compare one step of images with masks of 0, 1, 2 and 4 patches, whose inverses it rounds to 32 bits."""
    t, (teacher, _) = 2**-5, other_views(labels)
    mask = torch.arange(4) < torch.tensor([0, 4, 1, 2, 0, 4])[:, None]
    theirs = peer("lightly.loss.ibot_loss.IBOTPatchLoss")(output_dim=4, teacher_temp=t).double()
    ours = cz.IBOT(4, teacher_temperature=t).double()
    return lambda x: ours(x, teacher, mask.sum(1)), lambda x: theirs(teacher, x, mask[:, None])


def msn(labels: Tensor) -> tuple[Loss, Loss]:
    """It adds log 9, of its prototypes."""
    theirs, ours, teacher = peer("lightly.loss.msn_loss.MSNLoss")(), cz.MSN(9, 4, iterations=3), other_views(labels)[0]
    w = ours.double().prototypes.detach()
    return lambda *x: ours(torch.stack(x, 1), teacher), lambda *x: theirs(torch.cat(x), teacher, w) - math.log(9)


def distilled(labels: Tensor) -> tuple[Loss, Loss]:
    ours, teacher = cz.ClipDistillation(temperature=0.2, teacher_temperature=0.1), other_views(labels)
    theirs = peer("open_clip.loss.DistillClipLoss")()
    return lambda *x: 2 * ours(*x, *teacher), lambda *x: sum(theirs(*unit(*x), 5.0, *unit(*teacher), 10.0))


def tico(labels: Tensor) -> tuple[Loss, Loss]:
    """Compare the second step, whose covariance holds the first one's."""
    ours, theirs = cz.TiCo(4).double(), peer("lightly.loss.tico_loss.TiCoLoss")()
    for loss in (ours, theirs):
        loss(*other_views(labels))
    return ours.eval(), lambda *views: theirs(*views, update_covariance_matrix=False)


def in_64_bits(theirs: Any, ours: cz.SIGReg) -> None:
    """Give the peer's SIGReg the directions of ours, and the constants that it rounds to 32 bits."""
    directions = F.normalize(ours.directions().double(), dim=0)
    theirs._generate_unit_vectors = lambda *_: directions
    t = torch.linspace(0, 3, 17, dtype=torch.float64)
    theirs.t, theirs.phi = t, (-t.square() / 2).exp()
    theirs.weights = theirs.phi * torch.tensor([1.0, *[2.0] * 15, 1.0], dtype=torch.float64) * (3 / 16)


def sigreg(_: Tensor) -> tuple[Loss, Loss]:
    ours, theirs = cz.SIGReg(4, num_slices=64).eval(), peer("lightly.loss.lejepa_loss.SIGReg")(num_vectors=64)
    in_64_bits(theirs, ours)
    return ours, theirs


def lejepa(_: Tensor) -> tuple[Loss, Loss]:
    """Compare with the same directions; the first two views are global."""
    ours = cz.LeJEPA(4, lambda_=0.3, num_slices=64).eval()
    theirs = peer("lightly.loss.lejepa_loss.LeJEPALoss")(lambda_param=0.3, sigreg_num_vectors=64)
    in_64_bits(theirs.sigreg, ours)
    return ours, lambda *views: theirs(global_proj=torch.stack(views[:2]), local_proj=torch.stack(views[2:]))


def koleo(_: Tensor) -> tuple[Loss, Loss]:
    """Compare without the equal embeddings, to whose difference theirs adds 1e-8, in groups of five."""
    ours, theirs = cz.KoLeo(group_size=5), peer("lightly.loss.koleo_loss.KoLeoLoss")()
    return lambda z: ours(z[1:]), lambda z: (theirs(z[1:6]) + theirs(z[6:])) / 2


def visreg(_: Tensor) -> tuple[Loss, Loss]:
    """Compare with the same directions; the first two views are global, and theirs rounds quantiles to 32 bits."""
    ours = cz.VISReg(4, num_slices=64, scale_weight=2.0, shape_weight=0.5, center_weight=3.0).eval()
    weights = {"lambda_scale": 2.0, "lambda_shape": 0.5, "lambda_center": 3.0}
    theirs = peer("lightly.loss.visreg_loss.VISRegLoss")(num_slices=64, **weights)
    directions = ours.directions().double()

    def of_views(*views: Tensor) -> Tensor:
        with patch.object(torch, "randn", lambda *_, **__: directions):
            return theirs(global_proj=torch.stack(views[:2]), local_proj=torch.stack(views[2:]))

    return ours, of_views


OF_IMAGES: dict[str, Peer] = {
    "DCL": lightly("dcl_loss.DCLLoss", cz.DCL(temperature=0.1)),
    "DCLW": lightly("dcl_loss.DCLWLoss", cz.DCL(temperature=0.1, sigma=0.5)),
    "BarlowTwins": lightly("barlow_twins_loss.BarlowTwinsLoss", cz.BarlowTwins(lambda_=5e-3)),
    "AlignUniform": lightly("hypersphere_loss.HypersphereLoss", cz.AlignUniform(t=1.0)),
    "TiCo": Peer(tico, 2),
    "KoLeo": Peer(koleo, tolerance=1e-7),
    "SIGReg": Peer(sigreg),
    "LeJEPA": Peer(lejepa, 3),
    "VISReg": Peer(visreg, 3, tolerance=1e-6),
    "SwAV": Peer(swav, 3),
    "MSN": Peer(msn, 2),
    "DINO": Peer(dino, 3),
    "IBOT": Peer(ibot),
    "ClipDistillation": Peer(distilled, 2),
}

PEERS = OF_TEXTS | OF_METRICS | OF_IMAGES


def compare(entry: Peer, seeds: Sequence[int] = SEEDS) -> None:
    for seed in seeds:
        labels = entry.labels(seed)
        embeddings = (rows(len(labels), 4, seed=10 * seed + view) for view in range(entry.views))
        assert_same(*entry.make(labels), *embeddings, tolerance=entry.tolerance)


@pytest.mark.filterwarnings("ignore")  # of theirs: DCLWLoss copies a tensor in a way that torch advises against
@pytest.mark.parametrize("name", PEERS)
def test_it_is_the_loss_of_another_library(name: str) -> None:
    compare(PEERS[name])


SLIPS = {"CoSENT": lambda a, b: cz.CoSENT()(a, b, torch.arange(len(a))), "DCL": cz.DCL(temperature=0.11)}
"""One term too few, one setting apart."""


@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_is_seen(name: str) -> None:
    peer_of, slip = PEERS[name], SLIPS[name]
    with pytest.raises(AssertionError):
        compare(Peer(lambda labels: (slip, peer_of.make(labels)[1]), peer_of.views))
