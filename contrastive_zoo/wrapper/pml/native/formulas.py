"""Losses of pytorch-metric-learning as losses of this library, with their distances, reducers and numbers as settings."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, TypeVar

import torch
from pytorch_metric_learning import distances, miners
from torch import Tensor, nn

from contrastive_zoo.loss_base.class_loss import ClassLoss
from contrastive_zoo.losses.class_softmax import ArcFace, CosFace, NormalizedSoftmax, ProxyAnchor, ProxyNCA, SoftTriple
from contrastive_zoo.losses.multi_positive import NPairs
from contrastive_zoo.losses.pair_margins import Contrastive, SignalToNoise
from contrastive_zoo.losses.ranking import FastAP
from contrastive_zoo.losses.soft_margins import LiftedStructure, MultiSimilarity
from contrastive_zoo.losses.sup_con import SINCERE, TupletMargin
from contrastive_zoo.losses.triplet import Mining
from contrastive_zoo.wrapper.pml.meaning import EPSILON, reducer_of, reduction_of
from contrastive_zoo.wrapper.pml.native import variants

C = TypeVar("C", bound=ClassLoss)
Settings = dict[str, Any]  # keyword arguments of this library's constructors


class NoExactTranslation(Exception):
    """Says why a loss has no exact translation."""


def require(condition: bool, reason: str) -> None:
    """Refuse a translation for this reason unless the condition holds."""
    if not condition:
        raise NoExactTranslation(reason)


def _metric(distance: Any) -> str | None:
    """Return which of this library's metrics a distance is; None if it is none of them."""
    if type(distance) is distances.LpDistance and distance.p == 2 and distance.power in (1, 2):
        return "distance" if distance.power == 1 else "squared distance"
    is_similarity = type(distance) in (distances.CosineSimilarity, distances.DotProductSimilarity)
    return "similarity" if is_similarity and distance.power == 1 else None


def _spelled(distance: Any) -> str:
    settings = {name: getattr(distance, name, None) for name in ("p", "power")}
    return f"{type(distance).__name__}({', '.join(f'{name}={x}' for name, x in settings.items())})"


def _normalizes(distance: Any) -> bool:
    normalizes: bool = distance.normalize_embeddings
    require(not normalizes or distance.p == 2, f"embeddings are divided by their {distance.p}-norm.")
    return normalizes


def _similarity(loss: Any) -> Settings:
    """Return the settings of a loss of cosines or dot products."""
    reason = f"it compares by {_spelled(loss.distance)}, this library's by cosine or dot product."
    require(_metric(loss.distance) == "similarity", reason)
    return {"normalize": _normalizes(loss.distance)}


def _require_cosine(loss: Any) -> None:
    require(_similarity(loss)["normalize"], "its embeddings are not normalised.")


def _euclidean(loss: Any, power: int = 1) -> Settings:
    """Return the settings of a loss of Euclidean distances, or of squared ones (power 2)."""
    squared = " squared" if power == 2 else ""
    reason = f"it compares by {_spelled(loss.distance)}, this library's by{squared} Euclidean distance."
    require(_metric(loss.distance) == f"{squared} distance".strip(), reason)
    return {"normalize": _normalizes(loss.distance)}


def _any_metric(distance: Any) -> Settings:
    """Return the settings of a loss that takes any of this library's metrics."""
    metric = _metric(distance)
    require(metric is not None, f"it compares by {_spelled(distance)}, which is no metric of this library.")
    return {"metric": metric, "normalize": _normalizes(distance)}


def _require_same_distance(loss: Any, miner: Any) -> None:
    reason = f"the miner compares by {_spelled(miner.distance)}, the loss by {_spelled(loss.distance)}."
    require(_any_metric(miner.distance) == _any_metric(loss.distance), reason)


MEAN_OR_SUM: dict[str, Settings] = {"mean": {}, "sum": {"reduction": "sum"}}
NONZERO_OR_SUM: dict[str, Settings] = {"nonzero": {"average": "nonzero"}, "sum": {"reduction": "sum"}}
AVERAGES: dict[str, Settings] = {**NONZERO_OR_SUM, "mean": {"average": "all"}}


def _reduction(loss: Any, options: Mapping[str, Settings] = MEAN_OR_SUM) -> Settings:
    """Return the option for the loss's reducer, of ``options`` by the name of its reduction."""
    parts = [reducer_of(loss.reducer, x) for x in loss.sub_loss_names()]
    kinds = {reduction_of(x) for x in parts}
    names = [type(x).__name__ for x in parts]
    require(len(kinds) == 1, f"its parts are reduced differently, by {', '.join(names)}.")
    kind = kinds.pop() or ""
    require(kind in options, f"{names[0]} has no option here.")
    return options[kind]


def _numbers(loss: Any, *same: str, **renamed: str) -> Settings:
    """Return numbers of a loss: ``same`` have one name in both libraries, ``renamed`` are theirs by our names."""
    names = dict(zip(same, same, strict=True)) | renamed
    values = {name: getattr(loss, attribute) for name, attribute in names.items()}
    for name, x in values.items():
        require(isinstance(x, Real), f"its {names[name]} is {type(x).__name__}, not a number.")
    return {name: float(x) for name, x in values.items()}


def _inverse(x: float, name: str) -> float:
    require(x > 0, f"{name} is {x}, and not positive.")
    return 1 / x


def contrastive(loss: Any) -> Contrastive:
    margins = _numbers(loss, "pos_margin", "neg_margin")
    return Contrastive(**margins, **_any_metric(loss.distance), **_reduction(loss, AVERAGES))


def signal_to_noise(loss: Any) -> SignalToNoise:
    reason = f"it compares by {_spelled(loss.distance)}, this library's by the plain ratio."
    require(loss.distance.power == 1, reason)
    margins = _numbers(loss, "pos_margin", "neg_margin")
    return SignalToNoise(**margins, normalize=_normalizes(loss.distance), **_reduction(loss, AVERAGES))


def lifted_structure(loss: Any) -> LiftedStructure:
    return LiftedStructure(**_numbers(loss, "pos_margin", "neg_margin"), **_euclidean(loss), **_reduction(loss))


def tuplet_margin(loss: Any) -> TupletMargin:
    numbers = _numbers(loss, "scale", "margin")
    _similarity(loss)
    temperature = _inverse(numbers["scale"], "scale")
    return TupletMargin(temperature=temperature, margin=math.degrees(numbers["margin"]), **_reduction(loss))


def triplet(loss: Any, miner: Any) -> variants.FirstHardestTriplet:
    require(not loss.swap, "swap compares positives with negatives.")
    if miner is None:
        _require_all_triplets(loss)
    settings = _any_metric(loss.distance) | _numbers(loss, "margin") | {"soft": bool(loss.smooth_loss)}
    largest = {"distance": 2, "squared distance": 4, "similarity": 2}[settings["metric"]]
    threshold = variants.SOFTPLUS_THRESHOLD
    is_below = settings["normalize"] and settings["margin"] + largest <= threshold
    reason = f"its softplus is linear above {threshold}, which distances may exceed."
    require(not loss.smooth_loss or is_below, reason)
    reduction = _reduction(loss, AVERAGES)
    if loss.smooth_loss and reduction.get("average") == "nonzero":
        reduction = {"average": "all"}  # no soft loss is 0
    return variants.FirstHardestTriplet(**settings, **reduction, mining=_mining(loss, miner, reduction))


def _require_all_triplets(loss: Any) -> None:
    require(loss.triplets_per_anchor == "all", f"it draws {loss.triplets_per_anchor} triplets an anchor.")


def _mining(loss: Any, miner: Any, reduction: Settings) -> Mining:
    """Return the ``mining`` equal to the miner; triplets of its larger margin have loss 0 and change no mean."""
    if miner is None:
        return "all"
    _require_same_distance(loss, miner)
    if type(miner) is miners.BatchHardMiner and miner.allowed_pos_range is None and miner.allowed_neg_range is None:
        return "hard"
    is_option = type(miner) is miners.TripletMarginMiner and miner.type_of_triplets in ("semihard", "all")
    require(is_option, f"{type(miner).__name__} has no option here with these settings.")
    semi_hard = miner.type_of_triplets == "semihard"
    require(not semi_hard or loss.margin > 0, "semi-hard negatives lie within a positive margin.")
    zeros_count = loss.smooth_loss or reduction.get("average") == "all"
    same_margin = miner.margin == loss.margin and (semi_hard or not zeros_count)
    reason = f"the miner's margin of {miner.margin} leaves other triplets than the loss's margin of {loss.margin}."
    require(same_margin or (miner.margin > loss.margin and not zeros_count), reason)
    return "semi-hard" if semi_hard else "all"


def multi_similarity(loss: Any, miner: Any) -> MultiSimilarity:
    settings = _numbers(loss, "alpha", "beta", "base") | _similarity(loss) | _reduction(loss)
    if miner is None:
        return MultiSimilarity(**settings)
    require(type(miner) is miners.MultiSimilarityMiner, f"{type(miner).__name__} has no option here.")
    _require_same_distance(loss, miner)
    return variants.MinedMultiSimilarity(**settings, **_numbers(miner, "epsilon"))


def circle(loss: Any) -> variants.CircleWithThreshold:
    settings = _numbers(loss, "m", "gamma") | _similarity(loss) | _reduction(loss, NONZERO_OR_SUM)
    return variants.CircleWithThreshold(**settings)


def margin(loss: Any) -> variants.MarginOfTriplets:
    _require_all_triplets(loss)
    _reduction(loss, {"divisor": {}})
    native = variants.MarginOfTriplets(
        **_numbers(loss, "margin"),
        num_classes=len(loss.beta) if len(loss.beta) > 1 else None,
        learn_beta=loss.learn_beta,
        nu=float(loss.nu) if loss.learn_beta else 0.0,
        **_euclidean(loss),
    )
    beta = native.get_parameter("beta")
    beta.data = loss.beta.detach().clone().reshape(beta.shape)
    return native


def nt_xent(loss: Any) -> SINCERE:
    """With labels the loss leaves an anchor's other positives out of the denominator, as SINCERE does."""
    return SINCERE(**_numbers(loss, "temperature"), average="pairs", **_similarity(loss), **_reduction(loss))


def fast_ap(loss: Any) -> FastAP:
    _euclidean(loss, power=2)
    return FastAP(num_bins=loss.num_bins, **_reduction(loss))


def n_pairs(loss: Any) -> NPairs:
    return NPairs(**_similarity(loss), **_reduction(loss))


def sup_con(loss: Any) -> variants.SupConOfSeveralClasses:
    reduction = _reduction(loss, {"nonzero": {}, "sum": {"reduction": "sum"}})
    return variants.SupConOfSeveralClasses(**_numbers(loss, "temperature"), **_similarity(loss), **reduction)


def nca(loss: Any) -> variants.NCAOfPositives:
    temperature = _inverse(float(loss.softmax_scale), "softmax_scale")
    return variants.NCAOfPositives(temperature=temperature, **_euclidean(loss, power=2), **_reduction(loss))


def ranked_list(loss: Any) -> variants.RankedListOfDistinct:
    settings = _numbers(loss, "margin", "alpha", "imbalance", t_p="Tp", t_n="Tn")
    return variants.RankedListOfDistinct(**settings, epsilon=EPSILON, **_euclidean(loss), **_reduction(loss))


def vicreg(loss: Any) -> variants.VICRegOfTwo:
    _reduction(loss, {"mean": {}})
    renamed = {"invariance": "invariance_lambda", "variance": "variance_mu", "covariance": "covariance_v"}
    return variants.VICRegOfTwo(**_numbers(loss, "eps", **renamed))


def arc_face(loss: Any) -> ArcFace:
    _require_cosine(loss)
    weights = _by_class(loss.W, loss.num_classes, getattr(loss, "sub_centers", 1))
    return _with_weights(ArcFace, weights, **_numbers(loss, "margin", "scale"), **_reduction(loss))


def cos_face(loss: Any) -> CosFace:
    _require_cosine(loss)
    return _with_weights(CosFace, loss.W.T, **_numbers(loss, "margin", "scale"), **_reduction(loss))


def normalized_softmax(loss: Any) -> NormalizedSoftmax:
    _require_cosine(loss)
    return _with_weights(NormalizedSoftmax, loss.W.T, **_numbers(loss, "temperature"), **_reduction(loss))


def proxy_nca(loss: Any) -> ProxyNCA:
    require(_euclidean(loss, power=2)["normalize"], "its embeddings are not normalised.")
    temperature = _inverse(float(loss.softmax_scale), "softmax_scale")
    return _with_weights(ProxyNCA, loss.proxies, temperature=temperature, **_reduction(loss))


def proxy_anchor(loss: Any) -> ProxyAnchor:
    _require_cosine(loss)
    _reduction(loss, {"divisor": {}})
    return _with_weights(ProxyAnchor, loss.proxies, **_numbers(loss, "margin", "alpha"))


def soft_triple(loss: Any) -> SoftTriple:
    _require_cosine(loss)
    settings = _numbers(loss, "la", "margin") | {"gamma": 1 / loss.gamma, "tau": 0.0}
    weights = _by_class(loss.fc, loss.num_classes, loss.centers_per_class)
    return _with_weights(SoftTriple, weights, **settings, **_reduction(loss))


def _with_weights(native: type[C], weights: Tensor, **settings: Any) -> C:
    """Return a loss with a copy of these weights, [C, d] or [C, k, d]."""
    if "sub_centers" in native.fields:
        settings["sub_centers"] = weights[0, ..., 0].numel()
    with torch.random.fork_rng(devices=[]):  # the constructor's random weights are replaced
        loss = native(len(weights), weights.shape[-1], **settings)
    assert loss.weights.shape == weights.shape
    loss.weights = nn.Parameter(weights.detach().clone(), requires_grad=weights.requires_grad)
    return loss


def _by_class(columns: Tensor, classes: int, centers: int = 1) -> Tensor:
    """Return weights [d, C k], a class's centres side by side, as [C, d] or [C, k, d]."""
    rows = columns.T.contiguous()
    return rows if centers == 1 else rows.view(classes, centers, -1)
