"""From a loss of pytorch-metric-learning to this library's loss with the same formula, or the reason why there is none."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from pytorch_metric_learning import losses, miners  # noqa: F401 - the example uses miners
from torch import Tensor, nn

from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.losses.compositions import WeightedSum
from contrastive_zoo.losses.info_nce import InfoNCE
from contrastive_zoo.losses.nt_xent import NTXent
from contrastive_zoo.wrapper.pml.meaning import COMPOSITES, members
from contrastive_zoo.wrapper.pml.native import formulas
from contrastive_zoo.wrapper.pml.native.formulas import NoExactTranslation, require


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
    require(kind in TRANSLATED, REFUSED.get(kind, "it is no loss of pytorch-metric-learning itself."))
    for name in ("embedding_regularizer", "weight_regularizer"):
        regularizer = getattr(loss, name, None)
        require(regularizer is None, f"its {name} has no option here. Add {type(regularizer).__name__} to the value.")
    if kind in _WITH_MINER:
        return TRANSLATED[kind](loss, miner)
    require(miner is None, f"{type(miner).__name__} has no option here.")
    return TRANSLATED[kind](loss)


def _self_supervised(loss: Any, miner: Any) -> Loss:
    """An anchor's only positive is the other view of the sample."""
    inner = loss.loss
    softmax = losses.NTXentLoss if not loss.symmetric else (losses.NTXentLoss, losses.SupConLoss)
    if isinstance(inner, softmax) and miner is None:
        labelled: Any = _translate(inner, None)
        settings = {name: getattr(labelled, name) for name in ("temperature", "normalize", "reduction")}
        return NTXent(**settings) if loss.symmetric else InfoNCE(**settings)
    require(loss.symmetric, f"{type(inner).__name__} of rows against reference rows has no option here.")
    require(type(inner) in _WITH_VIEWS, f"this library's {type(inner).__name__} takes labelled rows only.")
    return _translate(inner, miner)


def _multiple_losses(loss: Any, miner: Any) -> WeightedSum:
    require(miner is None or not loss.miners, "it has miners of its own.")
    result = members(loss)
    return WeightedSum(
        [_translate(x, own_miner or miner) for x, own_miner, _ in result], weights=[w for *_, w in result]
    )


_WITH_MINER = (*COMPOSITES, losses.TripletMarginLoss, losses.MultiSimilarityLoss)
_WITH_VIEWS = (
    losses.ContrastiveLoss, losses.SignalToNoiseRatioContrastiveLoss, losses.TripletMarginLoss,
    losses.MultiSimilarityLoss, losses.CircleLoss,
)  # fmt: skip

TRANSLATED: dict[type, Callable[..., Loss]] = {
    losses.ArcFaceLoss: formulas.arc_face,
    losses.CircleLoss: formulas.circle,
    losses.ContrastiveLoss: formulas.contrastive,
    losses.CosFaceLoss: formulas.cos_face,
    losses.FastAPLoss: formulas.fast_ap,
    losses.LiftedStructureLoss: formulas.lifted_structure,
    losses.MarginLoss: formulas.margin,
    losses.MultiSimilarityLoss: formulas.multi_similarity,
    losses.MultipleLosses: _multiple_losses,
    losses.NCALoss: formulas.nca,
    losses.NPairsLoss: formulas.n_pairs,
    losses.NTXentLoss: formulas.nt_xent,
    losses.NormalizedSoftmaxLoss: formulas.normalized_softmax,
    losses.ProxyAnchorLoss: formulas.proxy_anchor,
    losses.ProxyNCALoss: formulas.proxy_nca,
    losses.RankedListLoss: formulas.ranked_list,
    losses.SelfSupervisedLoss: _self_supervised,
    losses.SignalToNoiseRatioContrastiveLoss: formulas.signal_to_noise,
    losses.SoftTripleLoss: formulas.soft_triple,
    losses.SubCenterArcFaceLoss: formulas.arc_face,
    losses.SupConLoss: formulas.sup_con,
    losses.TripletMarginLoss: formulas.triplet,
    losses.TupletMarginLoss: formulas.tuplet_margin,
    losses.VICRegLoss: formulas.vicreg,
}
"""Losses that this library has, and the function that translates each."""

NO_LOSS = "it is no loss by itself."


def _by_hand(native: str) -> str:
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


class Original(NamedTuple):
    """The loss and the miner that were translated.

    The native loss takes embeddings with labels, or two views. The original computes calls with other arguments
    (``indices_tuple``, ``ref_emb``) from the native loss's weights.
    """

    loss: nn.Module
    miner: Callable[..., Any] | None

    def native_arguments(self, arguments: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """Return the native loss's positional arguments; None if only the original takes these arguments."""
        of_views = type(self.loss) in (losses.SelfSupervisedLoss, losses.VICRegLoss)
        names = ("embeddings", "ref_emb" if of_views else "labels")
        inputs = {name for name, x in arguments.items() if x is not None}
        return tuple(arguments[name] for name in names) if inputs == set(names) else None

    def with_weights_of(self, native: Loss) -> Callable[..., Any]:
        """Return the original as a function of its arguments and the native loss's weights, which get the gradient."""
        weights = _original_weights(self.loss, native)
        return lambda *args, **kwargs: torch.func.functional_call(self.loss, weights, args, kwargs)


def _original_weights(loss: Any, native: Any, prefix: str = "") -> dict[str, Tensor]:
    """Return the native loss's weights by the original's parameter names, in the original's layout."""
    weights: dict[str, Tensor] = {}
    if isinstance(loss, losses.MultipleLosses):
        keys = loss.losses if loss.is_dict else range(len(loss.losses))
        for key, (original, *_), member in zip(keys, members(loss), native.losses, strict=True):
            weights |= _original_weights(original, member, f"{prefix}losses.{key}.")
        return weights
    for name in ("W", "fc", "proxies"):
        if isinstance(getattr(loss, name, None), nn.Parameter):
            x: Tensor = native.weights
            weights[prefix + name] = x if name == "proxies" else x.reshape(-1, x.shape[-1]).T
    if isinstance(loss, losses.MarginLoss):
        if loss.learn_beta:
            weights[f"{prefix}beta"] = native.beta.reshape(loss.beta.shape)
        else:
            loss.beta = native.beta.detach().reshape(loss.beta.shape)
    return weights
