"""Which loss of this library each loss of pytorch-metric-learning is, and what its settings mean, or why it is none."""

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, NamedTuple

import torch
from pytorch_metric_learning import distances, losses, miners, reducers
from torch import Tensor, nn

from contrastive_zoo.engine.masked import masked_max, masked_min
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.losses import pair_margins, soft_margins, triplet
from contrastive_zoo.losses.angular_margins import ArcFace
from contrastive_zoo.losses.class_softmax import CosFace, NormalizedSoftmax, ProxyAnchor, ProxyNCA, SoftTriple
from contrastive_zoo.losses.multi_positive import NPairs
from contrastive_zoo.losses.pair_margins import Contrastive, Margin, SignalToNoise
from contrastive_zoo.losses.ranking import FastAP
from contrastive_zoo.losses.redundancy import VICReg
from contrastive_zoo.losses.soft_margins import LiftedStructure, MultiSimilarity
from contrastive_zoo.losses.sup_con import NCA, SINCERE, SupCon, TupletMargin

Settings = dict[str, Any]  # keyword arguments of this library's constructors
Reader = Callable[[Any], Settings]

SOFTPLUS_THRESHOLD = 20  # above it torch's softplus is the identity (``threshold`` of ``torch.nn.functional.softplus``)


class NoExactTranslation(Exception):
    """Says why a loss has no exact translation."""


def require(condition: bool, reason: str) -> None:
    if not condition:
        raise NoExactTranslation(reason)


def numbers(*same: str, **renamed: str) -> Reader:
    """Read numbers: ``same`` have one name in both libraries, ``renamed`` are theirs by our names."""
    names = dict(zip(same, same, strict=True)) | renamed

    def read(loss: Any) -> Settings:
        values = {name: getattr(loss, attribute) for name, attribute in names.items()}
        for name, x in values.items():
            require(isinstance(x, Real), f"its {names[name]} is {type(x).__name__}, not a number.")
        return {name: float(x) for name, x in values.items()}

    return read


def inverse(**renamed: str) -> Reader:
    """Read numbers that this library has the inverse of."""

    def read(loss: Any) -> Settings:
        values = numbers(**renamed)(loss)
        for name, x in values.items():
            require(x > 0, f"{renamed[name]} is {x}, and not positive.")
        return {name: 1 / x for name, x in values.items()}

    return read


def _metric(distance: Any) -> str | None:
    if type(distance) is distances.LpDistance and distance.p == 2 and distance.power in (1, 2):
        return "distance" if distance.power == 1 else "squared distance"
    is_similarity = type(distance) in (distances.CosineSimilarity, distances.DotProductSimilarity)
    return "similarity" if is_similarity and distance.power == 1 else None


def _spelled(distance: Any) -> str:
    return f"{type(distance).__name__}(p={getattr(distance, 'p', None)}, power={getattr(distance, 'power', None)})"


def _normalize(distance: Any, is_ours: bool, ours: str) -> Settings:
    require(is_ours, f"it compares by {_spelled(distance)}, this library's by {ours}.")
    normalize = distance.normalize_embeddings
    require(not normalize or distance.p == 2, f"embeddings are divided by their {distance.p}-norm.")
    return {"normalize": normalize}


def _compared_by(metric: str, ours: str) -> Reader:
    return lambda loss: _normalize(loss.distance, _metric(loss.distance) == metric, ours)


def of_unit_rows(read: Reader) -> Reader:
    """Read the distance of a loss that normalises its embeddings, which this library's always does."""

    def read_and_require(loss: Any) -> Settings:
        require(read(loss)["normalize"], "its embeddings are not normalised.")
        return {}

    return read_and_require


similarity = _compared_by("similarity", "cosine or dot product")
euclidean = _compared_by("distance", "Euclidean distance")
squared_euclidean = _compared_by("squared distance", "squared Euclidean distance")


def any_metric(loss: Any) -> Settings:
    metric = _metric(loss.distance)
    return {"metric": metric} | _normalize(loss.distance, metric is not None, "one of its metrics")


_REDUCTIONS = {reducers.DivisorReducer: "divisor", reducers.MeanReducer: "mean", reducers.SumReducer: "sum"}


def _reduction_of(reducer: Any) -> str:
    """Return how a reducer computes one number, "" without an option here; "nonzero" is the mean of losses above 0."""
    if type(reducer) in (reducers.AvgNonZeroReducer, reducers.ThresholdReducer):
        return "nonzero" if reducer.low == 0 and reducer.high is None else ""
    return _REDUCTIONS.get(type(reducer), "")


MEAN: dict[str, Settings] = {"mean": {}}
DIVISOR: dict[str, Settings] = {"divisor": {}}
MEAN_OR_SUM: dict[str, Settings] = {"mean": {}, "sum": {"reduction": "sum"}}
NONZERO: dict[str, Settings] = {"nonzero": {}, "sum": {"reduction": "sum"}}
NONZERO_OR_SUM: dict[str, Settings] = {**NONZERO, "nonzero": {"average": "nonzero"}}
AVERAGES: dict[str, Settings] = {**NONZERO_OR_SUM, "mean": {"average": "all"}}


def reduction(loss: Any, options: Mapping[str, Settings]) -> Settings:
    """Return the option for the loss's reducer, of ``options`` by the name of its reduction."""
    several = type(loss.reducer) is reducers.MultipleReducers
    of_parts = dict(loss.reducer.reducers) if several else {}
    default = loss.reducer.default_reducer if several else loss.reducer
    parts = [of_parts.get(x, default) for x in loss.sub_loss_names()]
    names, (kind, *others) = [type(x).__name__ for x in parts], {_reduction_of(x) for x in parts}
    require(not others, f"its parts are reduced differently, by {', '.join(names)}.")
    require(kind in options, f"{names[0]} has no option here.")
    return options[kind]


def thresholds_by_class(loss: Any) -> Settings:
    _require_all_triplets(loss)
    num_classes = len(loss.beta) if len(loss.beta) > 1 else None
    return {"num_classes": num_classes, "learn_beta": loss.learn_beta, "nu": float(loss.nu) if loss.learn_beta else 0.0}


def _require_all_triplets(loss: Any) -> None:
    require(loss.triplets_per_anchor == "all", f"it draws {loss.triplets_per_anchor} triplets an anchor.")


def triplets(loss: Any) -> Settings:
    require(not loss.swap, "swap compares positives with negatives.")
    settings = any_metric(loss) | {"soft": bool(loss.smooth_loss)}
    largest = {"distance": 2, "squared distance": 4, "similarity": 2}[settings["metric"]]
    is_below = settings["normalize"] and loss.margin + largest <= SOFTPLUS_THRESHOLD
    reason = f"its softplus is linear above {SOFTPLUS_THRESHOLD}, which distances may exceed."
    require(not loss.smooth_loss or is_below, reason)
    return settings


def mining(loss: Any, miner: Any, zeros_count: bool) -> triplet.Mining:
    """Return the ``mining`` equal to the miner; triplets of its larger margin have loss 0, which may not count."""
    if miner is None:
        _require_all_triplets(loss)
        return "all"
    _require_same_distance(loss, miner)
    if type(miner) is miners.BatchHardMiner and miner.allowed_pos_range is None and miner.allowed_neg_range is None:
        return "hard"
    is_option = type(miner) is miners.TripletMarginMiner and miner.type_of_triplets in ("semihard", "all")
    require(is_option, f"{type(miner).__name__} has no option here with these settings.")
    semi_hard = miner.type_of_triplets == "semihard"
    require(not semi_hard or loss.margin > 0, "semi-hard negatives lie within a positive margin.")
    same_margin = miner.margin == loss.margin and (semi_hard or not zeros_count)
    reason = f"the miner's margin of {miner.margin} leaves other triplets than the loss's margin of {loss.margin}."
    require(same_margin or (miner.margin > loss.margin and not zeros_count), reason)
    return "semi-hard" if semi_hard else "all"


def epsilon(loss: Any, miner: Any) -> Settings:
    require(type(miner) is miners.MultiSimilarityMiner, f"{type(miner).__name__} has no option here.")
    _require_same_distance(loss, miner)
    return numbers("epsilon")(miner)


def _require_same_distance(loss: Any, miner: Any) -> None:
    reason = f"the miner compares by {_spelled(miner.distance)}, the loss by {_spelled(loss.distance)}."
    require(any_metric(miner) == any_metric(loss), reason)


# Three losses take pytorch-metric-learning's values where the formulas leave them open. Each has the name of the public loss
# that it derives from, which errors and ``repr`` then show.


class Triplet(triplet.Triplet):
    """Mines the first of equally hard candidates, as BatchHardMiner does."""

    def hardest(self, distance: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        return masked_max(distance, positive, first=True) - masked_min(distance, negative, first=True)


class Circle(soft_margins.Circle):
    """The outer softplus is linear above ``SOFTPLUS_THRESHOLD``, as torch's is."""

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        losses, valid = super().rows(similarity, positive, negative)
        linear = losses + torch.log1p(-torch.exp(-losses.clamp(min=1)))
        return linear.where(linear > SOFTPLUS_THRESHOLD, losses), valid


class RankedList(pair_margins.RankedList):
    """Leaves out pairs of equal embeddings, at distance 0."""

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        distinct = similarity > 0
        losses, _ = super().rows(similarity, positive & distinct, negative & distinct)
        return losses, positive.any(1) | negative.any(1)


class Native(NamedTuple):
    """This library's loss of the same formula, and how its settings are read from the other loss."""

    kind: type[Loss]
    readers: tuple[Reader, ...] = ()
    reductions: Mapping[str, Settings] = MEAN_OR_SUM


_NO_FORMULA = "this library has no such formula."
_cosine, _unit_squared = of_unit_rows(similarity), of_unit_rows(squared_euclidean)
_margin_and_scale = numbers("margin", "scale")
_margins = numbers("pos_margin", "neg_margin")
_temperature, _softmax_scale = numbers("temperature"), inverse(temperature="softmax_scale")

LOSSES: dict[type[nn.Module], Native | str] = {
    losses.AngularLoss: "it compares unit rows with negatives that are not normalised, this library's all unit rows.",
    losses.ArcFaceLoss: Native(ArcFace, (_margin_and_scale, _cosine)),
    losses.CircleLoss: Native(Circle, (numbers("m", "gamma"), similarity), NONZERO_OR_SUM),
    losses.ContrastiveLoss: Native(Contrastive, (_margins, any_metric), AVERAGES),
    losses.CosFaceLoss: Native(CosFace, (_margin_and_scale, _cosine)),
    losses.CrossBatchMemory: "translate its loss, and wrap that in this library's CrossBatchMemory.",
    losses.DynamicSoftMarginLoss: _NO_FORMULA,
    losses.FastAPLoss: Native(FastAP, (lambda x: {"num_bins": x.num_bins}, squared_euclidean)),
    losses.GeneralizedLiftedStructureLoss: "anchors without a positive count with the half of the formula they have.",
    losses.HistogramLoss: _NO_FORMULA,
    losses.InstanceLoss: _NO_FORMULA,
    losses.IntraPairVarianceLoss: _NO_FORMULA,
    losses.LargeMarginSoftmaxLoss: "construct contrastive_zoo.LargeMarginSoftmax by name.",
    losses.LiftedStructureLoss: Native(LiftedStructure, (_margins, euclidean)),
    losses.ManifoldLoss: _NO_FORMULA,
    losses.MarginLoss: Native(Margin, (numbers("margin"), thresholds_by_class, euclidean), DIVISOR),
    losses.MultiSimilarityLoss: Native(MultiSimilarity, (numbers("alpha", "beta", "base"), similarity)),
    losses.NCALoss: Native(NCA, (_softmax_scale, squared_euclidean)),
    losses.NPairsLoss: Native(NPairs, (similarity,)),
    # with labels the loss leaves an anchor's other positives out of the denominator, as SINCERE does
    losses.NTXentLoss: Native(SINCERE, (_temperature, similarity, lambda _: {"average": "pairs"})),
    losses.NormalizedSoftmaxLoss: Native(NormalizedSoftmax, (_temperature, _cosine)),
    losses.P2SGradLoss: _NO_FORMULA,
    losses.PNPLoss: _NO_FORMULA,
    losses.ProxyAnchorLoss: Native(ProxyAnchor, (numbers("margin", "alpha"), _cosine), DIVISOR),
    losses.ProxyNCALoss: Native(ProxyNCA, (_softmax_scale, _unit_squared)),
    losses.RankedListLoss: Native(
        RankedList,
        (numbers("margin", "alpha", "imbalance", t_p="Tp", t_n="Tn"), euclidean,
         lambda _: {"epsilon": 1e-5})),  # what it adds to each weight of its means
    losses.SignalToNoiseRatioContrastiveLoss: Native(
        SignalToNoise,
        (_margins, lambda x: _normalize(x.distance, x.distance.power == 1, "the plain ratio")), AVERAGES),
    losses.SmoothAPLoss: "it follows its formula only where a batch has as many classes as rows of each.",
    losses.SoftTripleLoss: Native(
        SoftTriple, (numbers("la", "margin"), inverse(gamma="gamma"), _cosine, lambda _: {"tau": 0.0})),
    losses.SphereFaceLoss: "construct contrastive_zoo.LargeMarginSoftmax by name.",
    losses.SubCenterArcFaceLoss: Native(ArcFace, (_margin_and_scale, _cosine)),
    losses.SupConLoss: Native(SupCon, (_temperature, similarity), NONZERO),
    losses.ThresholdConsistentMarginLoss: "construct contrastive_zoo.ThresholdConsistentMargin by name.",
    losses.TripletMarginLoss: Native(Triplet, (numbers("margin"), triplets), AVERAGES),
    losses.TupletMarginLoss: Native(
        TupletMargin, (inverse(temperature="scale"), lambda x: {"margin": math.degrees(x.margin)}, _cosine)),
    losses.VICRegLoss: Native(
        VICReg,
        (numbers("eps", invariance="invariance_lambda", variance="variance_mu", covariance="covariance_v"),),
        MEAN),
}  # fmt: skip
"""All but MultipleLosses and SelfSupervisedLoss, which are what the losses inside them are."""
