"""pytorch-metric-learning's losses as this library's own: the same number, in memory linear in the batch.

A translation is exact or refused, on degenerate batches too: one class, all classes distinct, one or two rows,
duplicates. Where the other library's value is NaN (a mean of no anchors, the variance of one row), so is this one's. It
is exact as formulas go: where the other library's arithmetic gives up (a probability that underflows, a loss that rounds
to 0 and is then left out of a mean, the derivative of arccos at 1), this one's does not.
"""

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, NamedTuple, TypeVar

import torch
from pytorch_metric_learning import distances, losses, miners, reducers
from torch import Tensor, nn

from contrastive_zoo.adapters import pml_sharded
from contrastive_zoo.collectives import extreme_over_ranks, gather_rows, sum_over_ranks
from contrastive_zoo.compiling import uncompiled
from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.engine.rowwise import AnchorBlock, sum_over_anchors
from contrastive_zoo.loss_base.block_loss import BlockLoss
from contrastive_zoo.loss_base.class_loss import ClassLoss
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.preparation import begin_labelled
from contrastive_zoo.loss_base.row_loss import RowLoss
from contrastive_zoo.losses.arc_face import ArcFace
from contrastive_zoo.losses.circle import Circle
from contrastive_zoo.losses.contrastive import Contrastive
from contrastive_zoo.losses.cos_face import CosFace
from contrastive_zoo.losses.fast_ap import FastAP
from contrastive_zoo.losses.info_nce import InfoNCE
from contrastive_zoo.losses.lifted_structure import LiftedStructure
from contrastive_zoo.losses.margin import Margin
from contrastive_zoo.losses.multi_similarity import MultiSimilarity
from contrastive_zoo.losses.n_pairs import NPairs
from contrastive_zoo.losses.nca import NCA
from contrastive_zoo.losses.normalized_softmax import NormalizedSoftmax
from contrastive_zoo.losses.nt_xent import NTXent
from contrastive_zoo.losses.proxy_anchor import ProxyAnchor
from contrastive_zoo.losses.proxy_nca import ProxyNCA
from contrastive_zoo.losses.ranked_list import RankedList
from contrastive_zoo.losses.signal_to_noise import SignalToNoise
from contrastive_zoo.losses.sincere import SINCERE
from contrastive_zoo.losses.soft_triple import SoftTriple
from contrastive_zoo.losses.sup_con import SupCon, sup_con
from contrastive_zoo.losses.triplet import Mining, Triplet
from contrastive_zoo.losses.tuplet_margin import TupletMargin
from contrastive_zoo.losses.vicreg import VICReg, vicreg_over
from contrastive_zoo.losses.weighted_sum import WeightedSum
from contrastive_zoo.world import ALONE, World

C = TypeVar("C", bound=ClassLoss)
K = TypeVar("K", bound=type[Loss])
Settings = dict[str, Any]


def to_native(loss: nn.Module, miner: Callable[..., Any] | None = None) -> Loss:
    """This library's loss with the same formula, settings and weights.

    Weights are copied, as the parameter ``weights`` [C, d] (C classes, or [C, k, d] with k centres each), whatever the
    other library calls them and however it lays them out; β of MarginLoss is copied as ``beta``. The translation is a
    module of its own: give its parameters to the optimizer.

    Args:
        loss: of pytorch-metric-learning.
        miner: that would go with it; a few are options of this library's losses.

    Raises:
        ValueError: there is no exact translation, and why: a formula this library does not have, a distance, reducer,
            regularizer or miner that it has no option for.

    Example:
        >>> native = to_native(losses.TripletMarginLoss(0.2), miners.BatchHardMiner())
        >>> native.margin, native.mining
        (0.2, 'hard')
        >>> to_native(losses.HistogramLoss())
        Traceback (most recent call last):
        ...
        ValueError: HistogramLoss has no exact translation: this library has no such formula.
    """
    try:
        return _translation(loss, miner)
    except _Inexact as why:
        raise ValueError(f"{type(loss).__name__} has no exact translation: {why}") from None


class _Inexact(Exception):  # noqa: N818
    """Why a loss has no exact translation."""


class Asked(NamedTuple):
    """The loss and the miner that were asked for, where a native one stands in for them.

    The native loss takes embeddings with labels, or two views. What else the original takes (``indices_tuple``,
    ``ref_emb``), the original computes, with the native loss's weights.
    """

    loss: nn.Module
    miner: Callable[..., Any] | None

    def native_arguments(self, arguments: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """What the native loss is called with; None if only the original takes these arguments.

        Args:
            arguments: of the original's ``forward``, by name.

        Example:
            >>> Asked(losses.NTXentLoss(), None).native_arguments({"embeddings": 1, "labels": 2, "ref_emb": None})
            (1, 2)
            >>> Asked(losses.NTXentLoss(), None).native_arguments({"embeddings": 1, "labels": 2, "ref_emb": 3})
        """
        names = ("embeddings", "ref_emb" if type(self.loss) in _OF_VIEWS else "labels")
        given = {name for name, x in arguments.items() if x is not None}
        return tuple(arguments[name] for name in names) if given == set(names) else None

    def with_weights_of(self, native: Loss) -> Callable[..., Any]:
        """The original, computed with the weights that the native loss has learnt, which get the gradient."""
        lent = _lent(self.loss, native)
        return lambda *args, **kwargs: torch.func.functional_call(self.loss, lent, args, kwargs)


def asked(loss: nn.Module, miner: Callable[..., Any] | None = None) -> tuple[Loss, Asked]:
    """:func:`to_native`, and what was asked for.

    Raises:
        ValueError: there is no exact translation.

    Example:
        >>> asked(losses.NTXentLoss())[0].temperature
        0.07
    """
    return to_native(loss, miner), Asked(loss, miner)


def _lent(loss: Any, native: Any, prefix: str = "") -> dict[str, Tensor]:
    """The native loss's weights as the parameters of the original."""
    if isinstance(loss, losses.MultipleLosses):
        keys = loss.losses if loss.is_dict else range(len(loss.losses))
        inside = zip(keys, (x for x, *_ in pml_sharded.members(loss)), native.losses, strict=True)
        return {
            name: x for key, theirs, own in inside for name, x in _lent(theirs, own, f"{prefix}losses.{key}.").items()
        }
    lent: dict[str, Tensor] = {}
    for name in ("W", "fc", "proxies"):
        if isinstance(getattr(loss, name, None), nn.Parameter):
            weights: Tensor = native.weights
            lent[prefix + name] = weights if name == "proxies" else weights.reshape(-1, weights.shape[-1]).T
    if isinstance(loss, losses.MarginLoss):
        if loss.learn_beta:
            lent[f"{prefix}beta"] = native.beta.reshape(loss.beta.shape)
        else:
            loss.beta = native.beta.detach().reshape(loss.beta.shape)
    return lent


def _translation(loss: Any, miner: Any) -> Loss:
    kind = type(loss)
    if kind not in TRANSLATED:
        raise _Inexact(REFUSED.get(kind, "it is no loss of pytorch-metric-learning itself."))
    for name in ("embedding_regularizer", "weight_regularizer"):
        if getattr(loss, name, None) is not None:
            raise _Inexact(f"its {name} has no option here. Add {type(getattr(loss, name)).__name__} to the value.")
    if miner is not None and kind not in _TAKE_MINERS:
        raise _Inexact(f"{type(miner).__name__} has no option here.")
    return TRANSLATED[kind](loss, miner) if kind in _TAKE_MINERS else TRANSLATED[kind](loss)


def _named_as_its_base(kind: K) -> K:
    """A class whose name, in errors and where it is printed, is that of the loss that it is a variant of."""
    kind.__name__ = next(x.__name__ for x in kind.__mro__ if x.__name__[0] != "_")
    return kind


# ----------------------------------------------------------------------------------------- distances, reducers, numbers


def _is_of_unit_rows(distance: Any) -> bool:
    if distance.normalize_embeddings and distance.p != 2:
        raise _Inexact(f"rows are divided by their {distance.p}-norm.")
    return distance.normalize_embeddings


def _similarity(loss: Any) -> Settings:
    """Cosines or dot products."""
    distance = loss.distance
    if type(distance) not in (distances.CosineSimilarity, distances.DotProductSimilarity) or distance.power != 1:
        raise _Inexact(f"it compares by {_spelled(distance)}, this library's by cosine or dot product.")
    return {"normalize": _is_of_unit_rows(distance)}


def _euclidean(loss: Any, power: int = 1) -> Settings:
    distance = loss.distance
    if type(distance) is not distances.LpDistance or (distance.p, distance.power) != (2, power):
        squared = " squared" if power == 2 else ""
        raise _Inexact(f"it compares by {_spelled(distance)}, this library's by{squared} Euclidean distance.")
    return {"normalize": _is_of_unit_rows(distance)}


def _metric(distance: Any) -> Settings:
    """As the losses that take any of three metrics name it."""
    if type(distance) is distances.LpDistance and distance.p == 2 and distance.power in (1, 2):
        metric = "distance" if distance.power == 1 else "squared distance"
    elif type(distance) in (distances.CosineSimilarity, distances.DotProductSimilarity) and distance.power == 1:
        metric = "similarity"
    else:
        raise _Inexact(f"it compares by {_spelled(distance)}, which is no metric of this library.")
    return {"metric": metric, "normalize": _is_of_unit_rows(distance)}


def _spelled(distance: Any) -> str:
    settings = {name: getattr(distance, name, None) for name in ("p", "power")}
    return f"{type(distance).__name__}({', '.join(f'{name}={x}' for name, x in settings.items())})"


def _reduction(loss: Any, **known: Settings) -> Settings:
    """The settings that stand for a reducer: ``mean``, ``nonzero`` (a mean of what is above 0), ``sum``, ``divisor``."""
    reducer = loss.reducer
    inside = [reducer]
    if type(reducer) is reducers.MultipleReducers:
        inside = [dict(reducer.reducers).get(x, reducer.default_reducer) for x in loss.sub_loss_names()]
    kinds = {_reducer_kind(x) for x in inside}
    if len(kinds) > 1:
        raise _Inexact(f"its parts are reduced differently, by {', '.join(type(x).__name__ for x in inside)}.")
    (kind,) = kinds
    if kind not in known:
        raise _Inexact(f"{type(inside[0]).__name__} has no option here.")
    return known[kind]


def _reducer_kind(reducer: Any) -> str:
    if type(reducer) in (reducers.AvgNonZeroReducer, reducers.ThresholdReducer):
        return "nonzero" if reducer.low == 0 and reducer.high is None else "threshold"
    names = {reducers.MeanReducer: "mean", reducers.SumReducer: "sum", reducers.DivisorReducer: "divisor"}
    return names.get(type(reducer), "other")


_MEAN_OR_SUM: dict[str, Settings] = {"mean": {}, "sum": {"reduction": "sum"}}
_AVERAGES: dict[str, Settings] = {
    "nonzero": {"average": "nonzero"},
    "mean": {"average": "all"},
    "sum": {"reduction": "sum"},
}


def _numbers(loss: Any, **names: str) -> Settings:
    """Attributes that must be plain numbers, under this library's names."""
    found = {ours: getattr(loss, theirs) for ours, theirs in names.items()}
    for ours, x in found.items():
        if not isinstance(x, Real):
            raise _Inexact(f"its {names[ours]} is {type(x).__name__}, not a number.")
    return {ours: float(x) for ours, x in found.items()}


def _positive(x: float, name: str) -> float:
    if not x > 0:
        raise _Inexact(f"{name} is {x}, and not positive.")
    return x


# ------------------------------------------------------------------------------------------------------ pairs of a class


def _contrastive(loss: Any) -> Contrastive:
    margins = _numbers(loss, pos_margin="pos_margin", neg_margin="neg_margin")
    return Contrastive(**margins, **_metric(loss.distance), **_reduction(loss, **_AVERAGES))


def _signal_to_noise(loss: Any) -> SignalToNoise:
    if loss.distance.power != 1:
        raise _Inexact(f"it compares by {_spelled(loss.distance)}, this library's by the plain ratio.")
    margins = _numbers(loss, pos_margin="pos_margin", neg_margin="neg_margin")
    return SignalToNoise(**margins, normalize=_is_of_unit_rows(loss.distance), **_reduction(loss, **_AVERAGES))


def _triplet(loss: Any, miner: Any) -> Triplet:
    if loss.swap:
        raise _Inexact("swap compares positives with negatives.")
    if miner is None and loss.triplets_per_anchor != "all":
        raise _Inexact(f"it draws {loss.triplets_per_anchor} triplets an anchor.")
    settings = _metric(loss.distance) | _numbers(loss, margin="margin") | {"soft": bool(loss.smooth_loss)}
    farthest = {"distance": 2, "squared distance": 4, "similarity": 2}[settings["metric"]]
    if loss.smooth_loss and not (settings["normalize"] and settings["margin"] + farthest <= _LINEAR_FROM):
        raise _Inexact(f"its softplus is linear above {_LINEAR_FROM}, which these rows may reach.")
    reduction = _reduction(loss, **_AVERAGES)
    if loss.smooth_loss and reduction.get("average") == "nonzero":
        reduction = {"average": "all"}  # none of its losses is 0
    return _TripletOfFirst(**settings, **reduction, mining=_mining(loss, miner, reduction))


@_named_as_its_base
class _TripletOfFirst(Triplet):
    """:class:`Triplet` that mines the first of equally hard rows, as BatchHardMiner does."""

    first_of_equals = True


def _mining(loss: Any, miner: Any, reduction: Settings) -> Mining:
    """What a miner leaves, as an option; where losses of 0 do not count, it may leave more triplets of that kind."""
    if miner is None:
        return "all"
    if _metric(miner.distance) != _metric(loss.distance):
        raise _Inexact(f"the miner compares by {_spelled(miner.distance)}, the loss by {_spelled(loss.distance)}.")
    if type(miner) is miners.BatchHardMiner and miner.allowed_pos_range is None and miner.allowed_neg_range is None:
        return "hard"
    zeros_count = loss.smooth_loss or reduction.get("average") == "all"
    if type(miner) is miners.TripletMarginMiner and miner.type_of_triplets in ("semihard", "all"):
        semi_hard = miner.type_of_triplets == "semihard"
        if semi_hard and not loss.margin > 0:
            raise _Inexact("semi-hard negatives lie within a positive margin.")
        if miner.margin == loss.margin and (semi_hard or not zeros_count):
            return "semi-hard" if semi_hard else "all"
        if miner.margin > loss.margin and not zeros_count:
            return "semi-hard" if semi_hard else "all"
        raise _Inexact(
            f"the miner's margin of {miner.margin} leaves other triplets than the loss's of {loss.margin} calls for."
        )
    raise _Inexact(f"{type(miner).__name__} has no option here with these settings.")


def _multi_similarity(loss: Any, miner: Any) -> MultiSimilarity:
    epsilon = {}
    if type(miner) is miners.MultiSimilarityMiner:
        if _metric(miner.distance) != _metric(loss.distance):
            raise _Inexact(f"the miner compares by {_spelled(miner.distance)}, the loss by {_spelled(loss.distance)}.")
        epsilon = _numbers(miner, epsilon="epsilon")
    elif miner is not None:
        raise _Inexact(f"{type(miner).__name__} has no option here.")
    settings = _numbers(loss, alpha="alpha", beta="beta", base="base") | epsilon
    kind = _MultiSimilarityOfSome if epsilon else MultiSimilarity
    return kind(**settings, **_similarity(loss), **_reduction(loss, **_MEAN_OR_SUM))


class _ZeroOfFew(RowLoss):
    """A row loss that is 0, and without gradient, where too little of all ranks' rows counts."""

    @uncompiled
    def forward(self, *rows: Tensor, world: World | None = None, **named_rows: Tensor) -> Tensor:
        world = self.local() if world is None else world
        self._noted: list[Tensor] = []
        value = super().forward(*rows, world=world, **named_rows)
        noted, self._noted = torch.stack([value.new_zeros(2, dtype=torch.long), *self._noted]).sum(0), []
        return value * ~self.is_zero(sum_over_ranks(noted, gradient="complete", world=world))

    def note(self, *counts: Tensor) -> None:
        """Two numbers of a panel, which are added up."""
        self._noted.append(torch.stack(counts))

    def is_zero(self, noted: Tensor) -> Tensor:
        """Whether the sums of what was noted are too little."""
        raise NotImplementedError


@_named_as_its_base
class _MultiSimilarityOfSome(_ZeroOfFew, MultiSimilarity):
    """:class:`MultiSimilarity`, but 0 where at most one positive and one negative pair are mined of all rows."""

    def of_mined(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        self.note(positive.sum(), negative.sum())
        return super().of_mined(similarity, positive, negative)

    def is_zero(self, noted: Tensor) -> Tensor:
        return (noted <= 1).all()


_LINEAR_FROM = 20
"""Where torch's softplus becomes the identity."""


@_named_as_its_base
class _CircleAsInTorch(Circle):
    """:class:`Circle` whose outer softplus is linear above 20, as torch's is."""

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        found, valid = super().rows(similarity, positive, negative)
        linear = found + torch.log1p(-torch.exp(-found.clamp(min=1)))
        return linear.where(linear > _LINEAR_FROM, found), valid


def _circle(loss: Any) -> Circle:
    settings = _numbers(loss, m="m", gamma="gamma")
    reduction = _reduction(loss, nonzero={"average": "nonzero"}, sum={"reduction": "sum"})
    return _CircleAsInTorch(**settings, **_similarity(loss), **reduction)


def _nt_xent(loss: Any) -> SINCERE:
    temperature = _numbers(loss, temperature="temperature")
    return SINCERE(**temperature, average="pairs", **_similarity(loss), **_reduction(loss, **_MEAN_OR_SUM))


def _sup_con(loss: Any) -> SupCon:
    temperature = _numbers(loss, temperature="temperature")
    reduction = _reduction(loss, nonzero={}, sum={"reduction": "sum"})
    return _SupConOfClasses(**temperature, **_similarity(loss), **reduction)


def _sup_con_of_classes(
    embeddings: Tensor,
    labels: Tensor | None = None,
    *,
    temperature: float = 0.1,
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Tensor:
    """:func:`sup_con`, but 0 and without gradient where all rows are of one class: there is no negative pair."""
    value = sup_con(embeddings, labels, temperature=temperature, normalize=normalize, reduction=reduction, world=world)
    assert labels is not None  # sup_con has refused it
    edges = [labels.max(), ~labels.min()] if len(labels) else [labels.new_tensor(torch.iinfo(labels.dtype).min)] * 2
    highest, inverted_lowest = extreme_over_ranks(torch.stack(edges), "max", world).unbind()
    return value * (highest != ~inverted_lowest)


@_named_as_its_base
class _SupConOfClasses(SupCon, function=_sup_con_of_classes, block_function=SupCon.block_function):
    """:func:`_sup_con_of_classes` with its settings kept."""


def _lifted_structure(loss: Any) -> LiftedStructure:
    margins = _numbers(loss, pos_margin="pos_margin", neg_margin="neg_margin")
    return LiftedStructure(**margins, **_euclidean(loss), **_reduction(loss, **_MEAN_OR_SUM))


def _tuplet_margin(loss: Any) -> TupletMargin:
    settings = _numbers(loss, scale="scale", margin="margin")
    _similarity(loss)
    return TupletMargin(
        temperature=1 / _positive(settings["scale"], "scale"),
        margin=math.degrees(settings["margin"]),
        **_reduction(loss, **_MEAN_OR_SUM),
    )


def _margin(loss: Any) -> Margin:
    if loss.triplets_per_anchor != "all":
        raise _Inexact(f"it draws {loss.triplets_per_anchor} triplets an anchor.")
    _reduction(loss, divisor={})
    nu = float(loss.nu) if loss.learn_beta else 0.0
    classes = len(loss.beta) if len(loss.beta) > 1 else None
    native = _MarginOfTriplets(
        **_numbers(loss, margin="margin"), num_classes=classes, learn_beta=loss.learn_beta, nu=nu, **_euclidean(loss)
    )
    native.beta.data = loss.beta.detach().clone().reshape(native.beta.shape)
    return native


@_named_as_its_base
class _MarginOfTriplets(_ZeroOfFew, Margin):
    """:class:`Margin` without ν β where there is no triplet; with a β of each class, where no pair is active."""

    def on_block(self, block: AnchorBlock) -> tuple[Tensor, Tensor]:
        losses, counts = super().on_block(block)
        self.note((counts > 0).sum(), (counts >= 1).sum())
        return losses, counts

    def is_zero(self, noted: Tensor) -> Tensor:
        triplets, active = noted
        return (triplets if self.num_classes is None else active) == 0


def _nca(loss: Any) -> NCA:
    scale = _positive(float(loss.softmax_scale), "softmax_scale")
    return _NCAOfSome(temperature=1 / scale, **_euclidean(loss, power=2), **_reduction(loss, **_MEAN_OR_SUM))


def _nca_of_some(
    embeddings: Tensor,
    labels: Tensor | None = None,
    *,
    temperature: float = 1.0,
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Tensor:
    """:func:`contrastive_zoo.nca`, but NaN, the mean of nothing, where two or more rows have no positive."""
    z, ids, shards = begin_labelled(
        "NCA", embeddings, labels, temperature=temperature, normalize=normalize, reduction=reduction, world=world
    )
    pick = BlockLoss(NCA.block_function, temperature=temperature)
    value = sum_over_anchors(pick, z, ids, shards=shards, reduction=reduction, world=world)
    if reduction != "mean" or shards.total == 1:
        return value
    all_ids = gather_rows(ids, shards, world)
    return value if len(all_ids.unique()) < len(all_ids) else value + torch.nan


@_named_as_its_base
class _NCAOfSome(NCA, function=_nca_of_some, block_function=NCA.block_function):
    """:func:`_nca_of_some` with its settings kept."""


def _fast_ap(loss: Any) -> FastAP:
    _euclidean(loss, power=2)
    return FastAP(num_bins=loss.num_bins, **_reduction(loss, **_MEAN_OR_SUM))


def _n_pairs(loss: Any) -> NPairs:
    return NPairs(**_similarity(loss), **_reduction(loss, **_MEAN_OR_SUM))


def _ranked_list(loss: Any) -> RankedList:
    settings = _numbers(loss, margin="margin", alpha="alpha", t_p="Tp", t_n="Tn", imbalance="imbalance")
    return _RankedListOfDistinct(**settings, epsilon=1e-5, **_euclidean(loss), **_reduction(loss, **_MEAN_OR_SUM))


@_named_as_its_base
class _RankedListOfDistinct(RankedList):
    """:class:`RankedList` that takes no pair of equal rows, at distance 0, for a violation."""

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        distinct = similarity > 0
        found, _ = super().rows(similarity, positive & distinct, negative & distinct)
        return found, positive.any(1) | negative.any(1)


# --------------------------------------------------------------------------------------------- weights of classes, views


def _with_weights(native: type[C], weights: Tensor, **settings: Any) -> C:
    """A loss with a copy of these weights, [C, d] or [C, k, d]."""
    with torch.random.fork_rng(devices=[]):  # those that it would draw are not wanted
        loss = native(len(weights), weights.shape[-1], sub_centers=weights[0, ..., 0].numel(), **settings)
    assert loss.weights.shape == weights.shape
    loss.weights = nn.Parameter(weights.detach().clone(), requires_grad=weights.requires_grad)
    return loss


def _of_classes(columns: Tensor, classes: int, centers: int = 1) -> Tensor:
    """[d, C k], a class's centres side by side, as [C, d] or [C, k, d]."""
    rows = columns.T.contiguous()
    return rows if centers == 1 else rows.view(classes, centers, -1)


def _cosine(loss: Any) -> None:
    if not _similarity(loss)["normalize"]:
        raise _Inexact("its rows are not put on the unit sphere.")


def _arc_face(loss: Any) -> ArcFace:
    _cosine(loss)
    settings = _numbers(loss, margin="margin", scale="scale")
    weights = _of_classes(loss.W, loss.num_classes, getattr(loss, "sub_centers", 1))
    return _with_weights(ArcFace, weights, **settings, **_reduction(loss, **_MEAN_OR_SUM))


def _cos_face(loss: Any) -> CosFace:
    _cosine(loss)
    settings = _numbers(loss, margin="margin", scale="scale")
    return _with_weights(CosFace, loss.W.T, **settings, **_reduction(loss, **_MEAN_OR_SUM))


def _normalized_softmax(loss: Any) -> NormalizedSoftmax:
    _cosine(loss)
    settings = _numbers(loss, temperature="temperature")
    return _with_weights(NormalizedSoftmax, loss.W.T, **settings, **_reduction(loss, **_MEAN_OR_SUM))


def _proxy_nca(loss: Any) -> ProxyNCA:
    if not _euclidean(loss, power=2)["normalize"]:
        raise _Inexact("its rows are not put on the unit sphere.")
    temperature = 1 / _positive(float(loss.softmax_scale), "softmax_scale")
    return _with_weights(ProxyNCA, loss.proxies, temperature=temperature, **_reduction(loss, **_MEAN_OR_SUM))


def _proxy_anchor(loss: Any) -> ProxyAnchor:
    _cosine(loss)
    _reduction(loss, divisor={})
    return _with_weights(ProxyAnchor, loss.proxies, **_numbers(loss, margin="margin", alpha="alpha"))


def _soft_triple(loss: Any) -> SoftTriple:
    _cosine(loss)
    settings = _numbers(loss, la="la", margin="margin") | {"gamma": 1 / loss.gamma, "tau": 0.0}
    weights = _of_classes(loss.fc, loss.num_classes, loss.centers_per_class)
    return _with_weights(SoftTriple, weights, **settings, **_reduction(loss, **_MEAN_OR_SUM))


def _vicreg(loss: Any) -> VICReg:
    _reduction(loss, mean={})
    names = {"invariance": "invariance_lambda", "variance": "variance_mu", "covariance": "covariance_v", "eps": "eps"}
    return _VICRegOfTwo(**_numbers(loss, **names))


def _vicreg_of_two(
    view1: Tensor,
    view2: Tensor,
    *,
    invariance: float = 25.0,
    variance: float = 25.0,
    covariance: float = 1.0,
    eps: float = 1e-4,
    world: World = ALONE,
) -> Tensor:
    """:func:`contrastive_zoo.vicreg`, but NaN for a single sample, which has no variance."""
    weights: Settings = {"invariance": invariance, "variance": variance, "covariance": covariance, "eps": eps}
    return vicreg_over(view1, view2, degrees=lambda count: count - 1, gamma=1.0, **weights, world=world)


@_named_as_its_base
class _VICRegOfTwo(VICReg, function=_vicreg_of_two):
    """:func:`_vicreg_of_two` with its settings kept."""


def _self_supervised(loss: Any, miner: Any) -> Loss:
    """A view's partner is an anchor's only positive."""
    inner = loss.loss
    softmax = losses.NTXentLoss if not loss.symmetric else (losses.NTXentLoss, losses.SupConLoss)
    if isinstance(inner, softmax) and miner is None:
        labelled: Any = _translation(inner, None)
        kept = {name: getattr(labelled, name) for name in ("temperature", "normalize", "reduction")}
        return NTXent(**kept) if loss.symmetric else InfoNCE(**kept)
    if not loss.symmetric:
        raise _Inexact(f"{type(inner).__name__} of rows against reference rows has no option here.")
    if type(inner) not in _TAKE_VIEWS:
        raise _Inexact(f"this library's {type(inner).__name__} takes labelled rows only.")
    return _translation(inner, miner)


def _multiple(loss: Any, miner: Any) -> WeightedSum:
    members = pml_sharded.members(loss)
    if miner is not None and loss.miners:
        raise _Inexact("it has miners of its own.")
    return WeightedSum([_translation(x, own or miner) for x, own, _ in members], weights=[w for *_, w in members])


_TAKE_MINERS = (
    losses.TripletMarginLoss, losses.MultiSimilarityLoss, losses.SelfSupervisedLoss, losses.MultipleLosses
)  # fmt: skip
_OF_OTHERS = (losses.MultipleLosses, losses.SelfSupervisedLoss)
_OF_VIEWS = (losses.SelfSupervisedLoss, losses.VICRegLoss)
_TAKE_VIEWS = (
    losses.ContrastiveLoss, losses.SignalToNoiseRatioContrastiveLoss, losses.TripletMarginLoss,
    losses.MultiSimilarityLoss, losses.CircleLoss,
)  # fmt: skip

TRANSLATED: dict[type, Callable[..., Loss]] = {
    losses.ArcFaceLoss: _arc_face,
    losses.CircleLoss: _circle,
    losses.ContrastiveLoss: _contrastive,
    losses.CosFaceLoss: _cos_face,
    losses.FastAPLoss: _fast_ap,
    losses.LiftedStructureLoss: _lifted_structure,
    losses.MarginLoss: _margin,
    losses.MultiSimilarityLoss: _multi_similarity,
    losses.MultipleLosses: _multiple,
    losses.NCALoss: _nca,
    losses.NPairsLoss: _n_pairs,
    losses.NTXentLoss: _nt_xent,
    losses.NormalizedSoftmaxLoss: _normalized_softmax,
    losses.ProxyAnchorLoss: _proxy_anchor,
    losses.ProxyNCALoss: _proxy_nca,
    losses.RankedListLoss: _ranked_list,
    losses.SelfSupervisedLoss: _self_supervised,
    losses.SignalToNoiseRatioContrastiveLoss: _signal_to_noise,
    losses.SoftTripleLoss: _soft_triple,
    losses.SubCenterArcFaceLoss: _arc_face,
    losses.SupConLoss: _sup_con,
    losses.TripletMarginLoss: _triplet,
    losses.TupletMarginLoss: _tuplet_margin,
    losses.VICRegLoss: _vicreg,
}
"""Losses that this library has, and what translates them."""

_NO_FORMULA = "this library has no such formula."
_NO_LOSS = "it is no loss by itself."

REFUSED: dict[type, str] = {
    losses.AngularLoss: "it compares unit rows with negatives that are not normalised, this library's all unit rows.",
    losses.BaseLossWrapper: _NO_LOSS,
    losses.BaseMetricLossFunction: _NO_LOSS,
    losses.CrossBatchMemory: "translate its loss, and wrap that in this library's CrossBatchMemory.",
    losses.DynamicSoftMarginLoss: _NO_FORMULA,
    losses.EmbeddingRegularizerMixin: _NO_LOSS,
    losses.GeneralizedLiftedStructureLoss: "anchors without a positive count with the half of the formula they have.",
    losses.GenericPairLoss: _NO_LOSS,
    losses.HistogramLoss: _NO_FORMULA,
    losses.InstanceLoss: _NO_FORMULA,
    losses.IntraPairVarianceLoss: _NO_FORMULA,
    losses.LargeMarginSoftmaxLoss: _NO_FORMULA,
    losses.ManifoldLoss: _NO_FORMULA,
    losses.P2SGradLoss: _NO_FORMULA,
    losses.PNPLoss: _NO_FORMULA,
    losses.SmoothAPLoss: "it follows its formula only where a batch has as many classes as rows of each.",
    losses.SphereFaceLoss: _NO_FORMULA,
    losses.ThresholdConsistentMarginLoss: _NO_FORMULA,
    losses.WeightRegularizerMixin: _NO_LOSS,
}
"""Losses that this library does not have, or not quite, and why."""
