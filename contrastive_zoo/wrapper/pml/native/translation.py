"""From a loss of pytorch-metric-learning to this library's loss with the same formula, or the reason why there is none."""

from collections.abc import Callable
from typing import Any

from pytorch_metric_learning import losses, miners  # noqa: F401 - the example uses miners
from torch import nn

from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.losses.compositions import WeightedSum
from contrastive_zoo.losses.info_nce import InfoNCE
from contrastive_zoo.losses.nt_xent import NTXent
from contrastive_zoo.wrapper.pml.meaning import COMPOSITES, members
from contrastive_zoo.wrapper.pml.native import class_losses, neighbor_losses, pair_losses
from contrastive_zoo.wrapper.pml.native.settings import NoExactTranslation


def to_native(loss: nn.Module, miner: Callable[..., Any] | None = None) -> Loss:
    """Return this library's loss with the same formula, settings and weights.

    Weights are copied to the parameter ``weights``, [C, d] for C classes or [C, k, d] with k centres each, whatever their
    name and layout in pytorch-metric-learning; β of MarginLoss is copied to ``beta``. The translation has its own
    parameters: give them to the optimizer.

    Args:
        loss: a loss of pytorch-metric-learning.
        miner: the miner of that loss; a few miners are options of this library's losses.

    Raises:
        ValueError: there is no exact translation, with the reason: a formula that this library does not have, or a
            distance, reducer, regularizer or miner for which it has no option.

    Examples:
        >>> native = to_native(losses.TripletMarginLoss(0.2), miners.BatchHardMiner())
        >>> native.margin, native.mining
        (0.2, 'hard')
        >>> to_native(losses.HistogramLoss())
        Traceback (most recent call last):
        ...
        ValueError: HistogramLoss has no exact translation: construct contrastive_zoo.Histogram by name.
    """
    try:
        return _translate(loss, miner)
    except NoExactTranslation as reason:
        raise ValueError(f"{type(loss).__name__} has no exact translation: {reason}") from None


def _translate(loss: Any, miner: Any) -> Loss:
    kind = type(loss)
    if kind not in TRANSLATED:
        raise NoExactTranslation(REFUSED.get(kind, "it is no loss of pytorch-metric-learning itself."))
    for name in ("embedding_regularizer", "weight_regularizer"):
        if (regularizer := getattr(loss, name, None)) is not None:
            raise NoExactTranslation(f"its {name} has no option here. Add {type(regularizer).__name__} to the value.")
    if kind in _WITH_MINER:
        return TRANSLATED[kind](loss, miner)
    if miner is not None:
        raise NoExactTranslation(f"{type(miner).__name__} has no option here.")
    return TRANSLATED[kind](loss)


def _self_supervised(loss: Any, miner: Any) -> Loss:
    """Translate SelfSupervisedLoss: an anchor's only positive is the other view of the sample."""
    inner = loss.loss
    softmax = losses.NTXentLoss if not loss.symmetric else (losses.NTXentLoss, losses.SupConLoss)
    if isinstance(inner, softmax) and miner is None:
        labelled: Any = _translate(inner, None)
        settings = {name: getattr(labelled, name) for name in ("temperature", "normalize", "reduction")}
        return NTXent(**settings) if loss.symmetric else InfoNCE(**settings)
    if not loss.symmetric:
        raise NoExactTranslation(f"{type(inner).__name__} of rows against reference rows has no option here.")
    if type(inner) not in _WITH_VIEWS:
        raise NoExactTranslation(f"this library's {type(inner).__name__} takes labelled rows only.")
    return _translate(inner, miner)


def _multiple_losses(loss: Any, miner: Any) -> WeightedSum:
    """Translate MultipleLosses."""
    if miner is not None and loss.miners:
        raise NoExactTranslation("it has miners of its own.")
    result = members(loss)
    return WeightedSum([_translate(x, own or miner) for x, own, _ in result], weights=[w for *_, w in result])


_WITH_MINER = (*COMPOSITES, losses.TripletMarginLoss, losses.MultiSimilarityLoss)
_WITH_VIEWS = (
    losses.ContrastiveLoss, losses.SignalToNoiseRatioContrastiveLoss, losses.TripletMarginLoss,
    losses.MultiSimilarityLoss, losses.CircleLoss,
)  # fmt: skip

TRANSLATED: dict[type, Callable[..., Loss]] = {
    losses.ArcFaceLoss: class_losses.arc_face,
    losses.CircleLoss: pair_losses.circle,
    losses.ContrastiveLoss: pair_losses.contrastive,
    losses.CosFaceLoss: class_losses.cos_face,
    losses.FastAPLoss: neighbor_losses.fast_ap,
    losses.LiftedStructureLoss: pair_losses.lifted_structure,
    losses.MarginLoss: pair_losses.margin,
    losses.MultiSimilarityLoss: pair_losses.multi_similarity,
    losses.MultipleLosses: _multiple_losses,
    losses.NCALoss: neighbor_losses.neighborhood_components,
    losses.NPairsLoss: neighbor_losses.n_pairs,
    losses.NTXentLoss: neighbor_losses.nt_xent,
    losses.NormalizedSoftmaxLoss: class_losses.normalized_softmax,
    losses.ProxyAnchorLoss: class_losses.proxy_anchor,
    losses.ProxyNCALoss: class_losses.proxy_nca,
    losses.RankedListLoss: neighbor_losses.ranked_list,
    losses.SelfSupervisedLoss: _self_supervised,
    losses.SignalToNoiseRatioContrastiveLoss: pair_losses.signal_to_noise,
    losses.SoftTripleLoss: class_losses.soft_triple,
    losses.SubCenterArcFaceLoss: class_losses.arc_face,
    losses.SupConLoss: neighbor_losses.supervised_contrastive,
    losses.TripletMarginLoss: pair_losses.triplet,
    losses.TupletMarginLoss: pair_losses.tuplet_margin,
    losses.VICRegLoss: neighbor_losses.vicreg,
}
"""Losses that this library has, and the function that translates each."""

NO_LOSS = "it is no loss by itself."


def _by_hand(native: str) -> str:
    """Return the reason of a loss whose settings have no translation."""
    return f"construct contrastive_zoo.{native} by name."


REFUSED: dict[type, str] = {
    losses.AngularLoss: "it compares unit rows with negatives that are not normalised, this library's all unit rows.",
    losses.BaseLossWrapper: NO_LOSS,
    losses.BaseMetricLossFunction: NO_LOSS,
    losses.CrossBatchMemory: "translate its loss, and wrap that in this library's CrossBatchMemory.",
    losses.DynamicSoftMarginLoss: _by_hand("DynamicSoftMargin"),
    losses.EmbeddingRegularizerMixin: NO_LOSS,
    losses.GeneralizedLiftedStructureLoss: "anchors without a positive count with the half of the formula they have.",
    losses.GenericPairLoss: NO_LOSS,
    losses.HistogramLoss: _by_hand("Histogram"),
    losses.InstanceLoss: "Instance of this library is another function, a classifier of instances.",
    losses.IntraPairVarianceLoss: _by_hand("IntraPairVariance"),
    losses.LargeMarginSoftmaxLoss: _by_hand("LargeMarginSoftmax"),
    losses.ManifoldLoss: "this library has no such formula.",
    losses.P2SGradLoss: _by_hand("P2SGrad"),
    losses.PNPLoss: _by_hand("PNP"),
    losses.SmoothAPLoss: "it follows its formula only where a batch has as many classes as rows of each.",
    losses.SphereFaceLoss: _by_hand("SphereFace"),
    losses.ThresholdConsistentMarginLoss: _by_hand("ThresholdConsistentMargin"),
    losses.WeightRegularizerMixin: NO_LOSS,
}
"""Losses without an exact translation, and the reason."""
