"""pytorch-metric-learning's losses as this library's own: the same number and gradients, or a reason why not."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import pytest
import torch
from pytorch_metric_learning import distances as D
from pytorch_metric_learning import losses as L
from pytorch_metric_learning import miners as M
from pytorch_metric_learning import reducers as R
from pytorch_metric_learning import regularizers as G
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.adapters.pml_native import REFUSED, TRANSLATED, as_markdown, to_native
from contrastive_zoo.losses.base import Loss
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EXACT, distance, split

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")  # of NumPy, in their constructors

CLASSES, WIDTH = 5, 4
LABELS = torch.tensor([0, 2, 0, 1, 4, 0, 2, 4, 0, 1, 3, 0, 4, 2])  # one row of class 3, five of class 0


class Case(NamedTuple):
    """A loss, a miner, and what it is called with if that is not labelled rows."""

    loss: Callable[[], Any]
    miner: Callable[[], Any] | None = None
    call: str = "labels"


def semi_hard(margin: float) -> Callable[[], Any]:
    return lambda: M.TripletMarginMiner(margin, "semihard")


CASES = {
    "ArcFace": Case(lambda: L.ArcFaceLoss(CLASSES, WIDTH, margin=20, scale=8)),
    "Circle": Case(lambda: L.CircleLoss()),
    "Circle, gentle": Case(lambda: L.CircleLoss(m=0.25, gamma=10, reducer=R.SumReducer())),
    "Contrastive": Case(lambda: L.ContrastiveLoss()),
    "Contrastive, all": Case(
        lambda: L.ContrastiveLoss(0.2, 1.5, reducer=R.MeanReducer(), distance=D.LpDistance(power=2))
    ),
    "Contrastive, cosine": Case(lambda: L.ContrastiveLoss(1, 0, distance=D.CosineSimilarity())),
    "Contrastive, not normalised": Case(
        lambda: L.ContrastiveLoss(
            neg_margin=2, reducer=R.SumReducer(), distance=D.LpDistance(normalize_embeddings=False)
        )
    ),
    "Contrastive, views": Case(lambda: L.SelfSupervisedLoss(L.ContrastiveLoss()), call="views"),
    "CosFace": Case(lambda: L.CosFaceLoss(CLASSES, WIDTH, margin=0.2, scale=8)),
    "FastAP": Case(lambda: L.FastAPLoss(num_bins=7)),
    "LiftedStructure": Case(lambda: L.LiftedStructureLoss(neg_margin=1.2, pos_margin=0.1)),
    "Margin": Case(lambda: L.MarginLoss(0.3, beta=1.1)),
    "Margin, learnt": Case(lambda: L.MarginLoss(learn_beta=True, nu=0.3)),
    "Margin, of each class": Case(lambda: L.MarginLoss(learn_beta=True, nu=0.3, num_classes=9, beta=0.6)),
    "Margin, by class": Case(lambda: L.MarginLoss(learn_beta=True, num_classes=CLASSES)),
    "MultiSimilarity": Case(lambda: L.MultiSimilarityLoss(alpha=3, beta=20, base=0.4)),
    "MultiSimilarity, mined": Case(lambda: L.MultiSimilarityLoss(), lambda: M.MultiSimilarityMiner(0.2)),
    "MultipleLosses": Case(
        lambda: L.MultipleLosses([L.NTXentLoss(), L.TripletMarginLoss()], [None, M.BatchHardMiner()], [1, 0.5])
    ),
    "MultipleLosses, named": Case(
        lambda: L.MultipleLosses({"a": L.NTXentLoss(), "b": L.SupConLoss()}, weights={"b": 0.5, "a": 2})
    ),
    "NCA": Case(lambda: L.NCALoss(softmax_scale=3)),
    "NPairs": Case(lambda: L.NPairsLoss()),
    "NPairs, not normalised": Case(lambda: L.NPairsLoss(distance=D.DotProductSimilarity(normalize_embeddings=False))),
    "NTXent": Case(lambda: L.NTXentLoss()),
    "NTXent, views": Case(lambda: L.SelfSupervisedLoss(L.NTXentLoss(0.2)), call="views"),
    "NTXent, one way": Case(lambda: L.SelfSupervisedLoss(L.NTXentLoss(0.2), symmetric=False), call="views"),
    "NormalizedSoftmax": Case(lambda: L.NormalizedSoftmaxLoss(CLASSES, WIDTH, temperature=0.3)),
    "ProxyAnchor": Case(lambda: L.ProxyAnchorLoss(CLASSES, WIDTH, margin=0.2, alpha=5)),
    "ProxyNCA": Case(lambda: L.ProxyNCALoss(CLASSES, WIDTH, softmax_scale=2)),
    "RankedList": Case(lambda: L.RankedListLoss(0.3, 3, imbalance=0.4, alpha=1.1, Tp=1)),
    "SignalToNoise": Case(lambda: L.SignalToNoiseRatioContrastiveLoss(pos_margin=0.1, neg_margin=1.5)),
    "SoftTriple": Case(lambda: L.SoftTripleLoss(CLASSES, WIDTH, centers_per_class=3, la=5, gamma=0.2, margin=0.1)),
    "SubCenterArcFace": Case(lambda: L.SubCenterArcFaceLoss(num_classes=CLASSES, embedding_size=WIDTH, scale=8)),
    "SupCon": Case(lambda: L.SupConLoss(0.3)),
    "SupCon, views": Case(lambda: L.SelfSupervisedLoss(L.SupConLoss(0.3)), call="views"),
    "TripletMargin": Case(lambda: L.TripletMarginLoss(0.3)),
    "TripletMargin, smooth": Case(lambda: L.TripletMarginLoss(0.3, smooth_loss=True)),
    "TripletMargin, cosine, all": Case(
        lambda: L.TripletMarginLoss(0.3, reducer=R.MeanReducer(), distance=D.CosineSimilarity())
    ),
    "TripletMargin, hardest": Case(lambda: L.TripletMarginLoss(0.3), lambda: M.BatchHardMiner()),
    "TripletMargin, hardest, all": Case(
        lambda: L.TripletMarginLoss(0.3, reducer=R.MeanReducer()), lambda: M.BatchHardMiner()
    ),
    "TripletMargin, semi-hard": Case(lambda: L.TripletMarginLoss(0.1), semi_hard(0.3)),
    "TripletMargin, semi-hard, all": Case(
        lambda: L.TripletMarginLoss(0.3, reducer=R.MeanReducer()), semi_hard(0.3)
    ),
    "TripletMargin, semi-hard, smooth": Case(lambda: L.TripletMarginLoss(0.3, smooth_loss=True), semi_hard(0.3)),
    "TripletMargin, all violating": Case(lambda: L.TripletMarginLoss(0.1), lambda: M.TripletMarginMiner(0.3)),
    "TupletMargin": Case(lambda: L.TupletMarginLoss(margin=10, scale=9)),
    "VICReg": Case(lambda: L.VICRegLoss(2, 30, 4), call="views"),
}  # fmt: skip


class Result(NamedTuple):
    value: Tensor
    rows: list[Tensor]
    parameters: list[Tensor]


def rows(call: str, seed: int) -> list[Tensor]:
    z, other = torch.randn(2, len(LABELS), WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return [z, other] if call == "views" else [z, LABELS]


def result(loss: Any, given: list[Tensor], *indices: Any) -> Result:
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in given]
    by_name = isinstance(loss, L.VICRegLoss)  # whose second positional argument is something else
    value = loss(leaves[0], ref_emb=leaves[1]) if by_name else loss(*leaves, *indices)
    learnt = [x for x in loss.parameters() if x.requires_grad]
    wanted = [x for x in leaves if x.requires_grad] + learnt
    found = torch.autograd.grad(value, wanted)
    return Result(value.detach(), list(found[: len(wanted) - len(learnt)]), list(found[len(wanted) - len(learnt) :]))


def as_ours(theirs: Tensor, ours: Tensor) -> Tensor:
    """A gradient of [d, C k] weights as one of [C, k, d]; proxies and β lie alike."""
    return theirs.reshape(ours.shape) if theirs.shape == ours.shape or ours.ndim < 2 else theirs.T.reshape(ours.shape)


def error(ours: Result, theirs: Result) -> float:
    errors = [distance(ours.value, theirs.value)]
    errors += [distance(x, y) for x, y in zip(ours.rows, theirs.rows, strict=True)]
    errors += [distance(x, as_ours(y, x)) for x, y in zip(ours.parameters, theirs.parameters, strict=True)]
    return max(float("inf") if x != x else x for x in errors)


def made(case: Case, seed: int = 0) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    return case.loss().double(), case.miner and case.miner()


def theirs(case: Case, given: list[Tensor], seed: int = 0) -> Result:
    loss, miner = made(case, seed)
    return result(loss, given, *([miner(*given)] if miner else []))


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_are_theirs(name: str) -> None:
    case = CASES[name]
    for seed in range(3):
        given = rows(case.call, seed)
        native = to_native(*made(case, seed))
        assert isinstance(native, Loss)
        assert error(result(native, given), theirs(case, given, seed)) <= EXACT


MUTANTS = {
    "ArcFace": {"margin": 0.5, "scale": 9.0},
    "Circle, gentle": {"m": 0.4, "gamma": 11.0, "reduction": "mean"},
    "Contrastive": {"pos_margin": 0.1, "neg_margin": 1.1, "metric": "squared distance", "average": "all"},
    "Margin": {"margin": 0.2},
    "MultiSimilarity": {"alpha": 2.0, "beta": 50.0, "base": 0.5, "epsilon": 0.1},
    "MultiSimilarity, mined": {"epsilon": None},
    "NTXent": {"temperature": 0.1, "average": "anchors", "normalize": False},
    "NTXent, one way": {"symmetric": True},
    "RankedList": {"epsilon": 0.0, "t_p": 0.0, "imbalance": 0.5},
    "SoftTriple": {"tau": 0.2, "gamma": 0.1, "la": 6.0},
    "TripletMargin, hardest": {"mining": "all"},
    "TripletMargin, semi-hard": {"mining": "hard", "margin": 0.3},
    "TupletMargin": {"margin": 9.0, "temperature": 1 / 8},
}
"""Settings that a wrong translation would have."""


@pytest.mark.parametrize(("name", "setting"), [(name, x) for name, settings in MUTANTS.items() for x in settings])
def test_a_wrong_setting_shows(name: str, setting: str) -> None:
    case = CASES[name]
    native, given = to_native(*made(case)), rows(case.call, 0)
    assert hasattr(native, setting)
    setattr(native, setting, MUTANTS[name][setting])
    assert error(result(native, given), theirs(case, given)) > 1e-5


def test_weights_in_another_order_show() -> None:
    case, given = CASES["SubCenterArcFace"], rows("labels", 0)
    native: Any = to_native(*made(case))
    native.weights = nn.Parameter(native.weights.detach().mT.reshape(native.weights.shape))
    assert error(result(native, given), theirs(case, given)) > 1e-3


def test_the_table_names_what_comes_out() -> None:
    for case in CASES.values():
        loss, miner = made(case)
        named = get_type_hints(TRANSLATED[type(loss)])["return"]
        assert isinstance(to_native(loss, miner), named), named


def test_every_export_translates_or_is_refused_with_a_reason() -> None:
    exported = {x for x in vars(L).values() if inspect.isclass(x)}
    assert exported == {*TRANSLATED, *REFUSED}
    assert not set(TRANSLATED) & set(REFUSED)
    assert set(TRANSLATED) == {type(case.loss()) for case in CASES.values()}
    assert all(len(why) > 20 for why in REFUSED.values())


def test_the_page_has_a_row_for_every_export() -> None:
    page = Path(__file__).parents[2] / "docs" / "pages" / "native-and-sharded.md"
    assert as_markdown() in page.read_text(encoding="utf-8")


REASONS: list[tuple[Callable[[], Any], Callable[[], Any] | None, str]] = [
    (lambda: L.HistogramLoss(), None, "no such formula"),
    (lambda: L.AngularLoss(), None, "not normalised"),
    (lambda: L.NTXentLoss(distance=D.LpDistance()), None, r"LpDistance\(p=2, power=1\)"),
    (lambda: L.NTXentLoss(distance=D.DotProductSimilarity(p=1)), None, "1-norm"),
    (lambda: L.NCALoss(distance=D.LpDistance()), None, "squared Euclidean"),
    (lambda: L.ContrastiveLoss(distance=D.SNRDistance()), None, "no metric"),
    (lambda: L.SignalToNoiseRatioContrastiveLoss(distance=D.SNRDistance(power=2)), None, "plain ratio"),
    (lambda: L.NTXentLoss(reducer=R.ThresholdReducer(low=0.1)), None, "ThresholdReducer"),
    (lambda: L.CircleLoss(reducer=R.MeanReducer()), None, "MeanReducer"),
    (lambda: L.SupConLoss(reducer=R.MeanReducer()), None, "MeanReducer"),
    (lambda: L.NTXentLoss(reducer=R.PerAnchorReducer()), None, "PerAnchorReducer"),
    (
        lambda: L.ContrastiveLoss(reducer=R.MultipleReducers({"pos_loss": R.SumReducer()})),
        None,
        "reduced differently, by SumReducer, MeanReducer",
    ),
    (lambda: L.NTXentLoss(embedding_regularizer=G.LpRegularizer()), None, "embedding_regularizer.*LpRegularizer"),
    (lambda: L.ArcFaceLoss(3, 2, weight_regularizer=G.LpRegularizer()), None, "weight_regularizer"),
    (lambda: L.NTXentLoss(temperature=nn.Parameter(torch.tensor(0.1))), None, "temperature is Parameter"),
    (lambda: L.MarginLoss(triplets_per_anchor=3), None, "draws 3 triplets"),
    (lambda: L.TripletMarginLoss(triplets_per_anchor=3), None, "draws 3 triplets"),
    (lambda: L.TripletMarginLoss(swap=True), None, "swap"),
    (lambda: L.TripletMarginLoss(18, smooth_loss=True, distance=D.LpDistance(power=2)), None, "softplus"),
    (lambda: L.TripletMarginLoss(0.3), lambda: M.TripletMarginMiner(0.3, "hard"), "TripletMarginMiner"),
    (lambda: L.TripletMarginLoss(0.3), lambda: M.TripletMarginMiner(0.1, "semihard"), "margin of 0.1"),
    (lambda: L.TripletMarginLoss(0.3, smooth_loss=True), lambda: M.TripletMarginMiner(0.3), "margin of 0.3"),
    (lambda: L.TripletMarginLoss(0.0), semi_hard(0.3), "positive margin"),
    (lambda: L.TripletMarginLoss(0.3), lambda: M.BatchHardMiner(allowed_pos_range=[0, 1]), "BatchHardMiner"),
    (lambda: L.TripletMarginLoss(0.3), lambda: M.BatchHardMiner(distance=D.LpDistance(power=2)), "power=2"),
    (lambda: L.MultiSimilarityLoss(), lambda: M.BatchHardMiner(), "BatchHardMiner"),
    (lambda: L.NTXentLoss(), lambda: M.BatchHardMiner(), "BatchHardMiner"),
    (lambda: L.SelfSupervisedLoss(L.NCALoss()), None, "labelled rows only"),
    (lambda: L.SelfSupervisedLoss(L.CircleLoss(), symmetric=False), None, "reference rows"),
    (lambda: L.MultipleLosses([L.NTXentLoss(), L.AngularLoss()]), None, "not normalised"),
    (lambda: type("Mine", (L.NTXentLoss,), {})(), None, "no loss of pytorch-metric-learning"),
]


@pytest.mark.parametrize(("loss", "miner", "why"), REASONS)
def test_what_is_not_the_same_is_refused_with_a_reason(loss: Any, miner: Any, why: str) -> None:
    with pytest.raises(ValueError, match=f"has no exact translation: .*{why}"):
        to_native(loss(), miner and miner())


def test_weights_are_copied_and_nothing_is_drawn() -> None:
    loss = L.SubCenterArcFaceLoss(num_classes=3, embedding_size=2)
    loss.W.requires_grad_(False)
    before = torch.get_rng_state()
    native: Any = to_native(loss)
    assert torch.equal(torch.get_rng_state(), before)
    assert native.weights.shape == (3, 3, 2)
    assert not native.weights.requires_grad
    assert torch.equal(native.weights[1, 2], loss.W[:, 5])
    native.weights.data.zero_()
    assert loss.W.abs().sum() > 0


@pytest.mark.parametrize("name", ["ArcFace", "Margin, learnt", "MultiSimilarity, mined", "TripletMargin, semi-hard"])
def test_distributed_loss_prefers_it(name: str, worlds: Worlds) -> None:
    case, (z, labels) = CASES[name], rows("labels", 0)

    def job(z: Tensor, labels: Tensor) -> Result:
        loss, miner = made(case)
        loss_fn = cz.DistributedLoss(loss, miner=miner, prefer_native=True)
        assert isinstance(loss_fn.loss, Loss)
        return result(loss_fn, [z, labels])

    expected = theirs(case, [z, labels])
    for shards in [(5, 9), (0, 11, 3)]:
        found = worlds.run(len(shards), job, each=list(zip(split(z, shards), split(labels, shards), strict=True)))
        everybody = torch.cat([x.rows[0] for x in found]) / len(shards)
        for x in found:
            assert error(Result(x.value, [everybody], x.parameters), expected) <= EXACT


def test_distributed_loss_keeps_what_has_no_translation() -> None:
    loss = L.AngularLoss()
    assert cz.DistributedLoss(loss, prefer_native=True).loss is loss
