"""Translations of losses of pairs and triplets."""

import math
from typing import Any

import torch
from pytorch_metric_learning import miners
from torch import Tensor

from contrastive_zoo.engine.anchor_block import AnchorBlock
from contrastive_zoo.engine.row_statistics import LogSumExp, Rows, run
from contrastive_zoo.losses.pair_margins import Contrastive, Margin, SignalToNoise
from contrastive_zoo.losses.soft_margins import Circle, LiftedStructure, MultiSimilarity
from contrastive_zoo.losses.sup_con import TupletMargin
from contrastive_zoo.losses.triplet import Mining, Triplet
from contrastive_zoo.wrapper.pml.meaning import spelled
from contrastive_zoo.wrapper.pml.native.settings import (
    AVERAGES,
    MEAN_OR_SUM,
    NONZERO_OR_SUM,
    NoExactTranslation,
    Settings,
    euclidean_settings,
    metric_settings,
    normalizes,
    number_settings,
    reduction_settings,
    require_positive,
    require_same_distance,
    similarity_settings,
)
from contrastive_zoo.wrapper.pml.native.variants import ZeroBelowCount, named_as_its_base

_SOFTPLUS_THRESHOLD = 20
"""Above it torch's softplus is the identity (``threshold`` of ``torch.nn.functional.softplus``)."""


def contrastive(loss: Any) -> Contrastive:
    """Translate ContrastiveLoss."""
    margins = number_settings(loss, "pos_margin", "neg_margin")
    return Contrastive(**margins, **metric_settings(loss.distance), **reduction_settings(loss, **AVERAGES))


def signal_to_noise(loss: Any) -> SignalToNoise:
    """Translate SignalToNoiseRatioContrastiveLoss.

    Raises:
        NoExactTranslation: it compares by another distance than the plain ratio, or a setting has no equivalent.
    """
    if loss.distance.power != 1:
        raise NoExactTranslation(f"it compares by {spelled(loss.distance)}, this library's by the plain ratio.")
    margins = number_settings(loss, "pos_margin", "neg_margin")
    return SignalToNoise(**margins, normalize=normalizes(loss.distance), **reduction_settings(loss, **AVERAGES))


def lifted_structure(loss: Any) -> LiftedStructure:
    """Translate LiftedStructureLoss."""
    margins = number_settings(loss, "pos_margin", "neg_margin")
    return LiftedStructure(**margins, **euclidean_settings(loss), **reduction_settings(loss, **MEAN_OR_SUM))


def tuplet_margin(loss: Any) -> TupletMargin:
    """Translate TupletMarginLoss."""
    settings = number_settings(loss, "scale", "margin")
    similarity_settings(loss)
    return TupletMargin(
        temperature=1 / require_positive(settings["scale"], "scale"),
        margin=math.degrees(settings["margin"]),
        **reduction_settings(loss, **MEAN_OR_SUM),
    )


# -------------------------------------------------------------------------------------------------------------- triplet


def triplet(loss: Any, miner: Any) -> Triplet:
    """Translate TripletMarginLoss and its miner.

    Raises:
        NoExactTranslation: it swaps anchors, draws triplets or rounds its softplus, or a setting or the miner has no
            equivalent.
    """
    if loss.swap:
        raise NoExactTranslation("swap compares positives with negatives.")
    if miner is None and loss.triplets_per_anchor != "all":
        raise NoExactTranslation(f"it draws {loss.triplets_per_anchor} triplets an anchor.")
    settings = metric_settings(loss.distance) | number_settings(loss, "margin") | {"soft": bool(loss.smooth_loss)}
    largest = {"distance": 2, "squared distance": 4, "similarity": 2}[settings["metric"]]
    if loss.smooth_loss and not (settings["normalize"] and settings["margin"] + largest <= _SOFTPLUS_THRESHOLD):
        raise NoExactTranslation(f"its softplus is linear above {_SOFTPLUS_THRESHOLD}, which distances may exceed.")
    reduction = reduction_settings(loss, **AVERAGES)
    if loss.smooth_loss and reduction.get("average") == "nonzero":
        reduction = {"average": "all"}  # no soft loss is 0
    return _FirstHardestTriplet(**settings, **reduction, mining=_mining(loss, miner, reduction))


@named_as_its_base
class _FirstHardestTriplet(Triplet):
    """:class:`Triplet` that mines the first of equally hard candidates, as BatchHardMiner does."""

    first_of_equals = True


def _mining(loss: Any, miner: Any, reduction: Settings) -> Mining:
    """Return the ``mining`` option that is equal to the miner.

    A miner with a larger margin than the loss adds triplets whose loss is 0. They change no mean that leaves out zeros.
    """
    if miner is None:
        return "all"
    require_same_distance(loss, miner)
    if type(miner) is miners.BatchHardMiner and miner.allowed_pos_range is None and miner.allowed_neg_range is None:
        return "hard"
    if type(miner) is not miners.TripletMarginMiner or miner.type_of_triplets not in ("semihard", "all"):
        raise NoExactTranslation(f"{type(miner).__name__} has no option here with these settings.")
    semi_hard = miner.type_of_triplets == "semihard"
    if semi_hard and not loss.margin > 0:
        raise NoExactTranslation("semi-hard negatives lie within a positive margin.")
    zeros_count = loss.smooth_loss or reduction.get("average") == "all"
    same_margin = miner.margin == loss.margin and (semi_hard or not zeros_count)
    if same_margin or (miner.margin > loss.margin and not zeros_count):
        return "semi-hard" if semi_hard else "all"
    raise NoExactTranslation(
        f"the miner's margin of {miner.margin} leaves other triplets than the loss's margin of {loss.margin}."
    )


# ----------------------------------------------------------------------------------------------------- multi-similarity


def multi_similarity(loss: Any, miner: Any) -> MultiSimilarity:
    """Translate MultiSimilarityLoss and its miner.

    Raises:
        NoExactTranslation: a setting or the miner has no equivalent.
    """
    settings = number_settings(loss, "alpha", "beta", "base")
    common = similarity_settings(loss) | reduction_settings(loss, **MEAN_OR_SUM)
    if miner is None:
        return MultiSimilarity(**settings, **common)
    if type(miner) is not miners.MultiSimilarityMiner:
        raise NoExactTranslation(f"{type(miner).__name__} has no option here.")
    require_same_distance(loss, miner)
    return _MinedMultiSimilarity(**settings, **number_settings(miner, "epsilon"), **common)


@named_as_its_base
class _MinedMultiSimilarity(ZeroBelowCount, MultiSimilarity):
    """:class:`MultiSimilarity` that is 0 if at most one positive and one negative pair are mined from the batch."""

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> Rows:
        rows = super().rows(similarity, positive, negative)
        results = next(rows)
        if self.epsilon is not None:  # these were the thresholds
            results = rows.send((yield results))
        positives, negatives, valid = results
        assert isinstance(positives, LogSumExp)
        assert isinstance(negatives, LogSumExp)
        self.count(positives.mask.sum(), negatives.mask.sum())
        _, result = run(rows, (yield positives, negatives, valid))
        assert result is not None
        return result

    def is_zero(self, counts: Tensor) -> Tensor:
        return (counts <= 1).all()


# --------------------------------------------------------------------------------------------------------------- circle


def circle(loss: Any) -> Circle:
    """Translate CircleLoss."""
    settings = number_settings(loss, "m", "gamma")
    return _CircleWithThreshold(**settings, **similarity_settings(loss), **reduction_settings(loss, **NONZERO_OR_SUM))


@named_as_its_base
class _CircleWithThreshold(Circle):
    """:class:`Circle` whose outer softplus is linear above 20, as torch's is."""

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> Rows:
        losses, valid = yield from super().rows(similarity, positive, negative)
        linear = losses + torch.log1p(-torch.exp(-losses.clamp(min=1)))
        return linear.where(linear > _SOFTPLUS_THRESHOLD, losses), valid


# --------------------------------------------------------------------------------------------------------------- margin


def margin(loss: Any) -> Margin:
    """Translate MarginLoss.

    Raises:
        NoExactTranslation: it draws triplets, or a setting has no equivalent.
    """
    if loss.triplets_per_anchor != "all":
        raise NoExactTranslation(f"it draws {loss.triplets_per_anchor} triplets an anchor.")
    reduction_settings(loss, divisor={})
    native = _MarginOfTriplets(
        **number_settings(loss, "margin"),
        num_classes=len(loss.beta) if len(loss.beta) > 1 else None,
        learn_beta=loss.learn_beta,
        nu=float(loss.nu) if loss.learn_beta else 0.0,
        **euclidean_settings(loss),
    )
    beta = native.get_parameter("beta")
    beta.data = loss.beta.detach().clone().reshape(beta.shape)
    return native


@named_as_its_base
class _MarginOfTriplets(ZeroBelowCount, Margin):
    """:class:`Margin` without the term ν β if there is no triplet, or, with one β per class, if no pair is active."""

    def on_block(self, block: AnchorBlock) -> Rows:
        losses, counts = yield from super().on_block(block)
        self.count((counts > 0).sum(), (counts >= 1).sum())
        return losses, counts

    def is_zero(self, counts: Tensor) -> Tensor:
        triplets, active = counts
        return (triplets if self.num_classes is None else active) == 0
