"""Which loss of this library each loss of pytorch-metric-learning is, or why it is none."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from pytorch_metric_learning import losses
from torch import Tensor, nn

from contrastive_zoo.engine.masked import masked_max, masked_min
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.losses import pair_margins, soft_margins, triplet
from contrastive_zoo.losses.class_softmax import ArcFace, CosFace, NormalizedSoftmax, ProxyAnchor, ProxyNCA, SoftTriple
from contrastive_zoo.losses.multi_positive import NPairs
from contrastive_zoo.losses.pair_margins import Contrastive, Margin, SignalToNoise
from contrastive_zoo.losses.ranking import FastAP
from contrastive_zoo.losses.redundancy import VICReg
from contrastive_zoo.losses.soft_margins import LiftedStructure, MultiSimilarity
from contrastive_zoo.losses.sup_con import NCA, SINCERE, SupCon, TupletMargin
from contrastive_zoo.wrapper.pml import settings as read

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
        return linear.where(linear > read.SOFTPLUS_THRESHOLD, losses), valid


class RankedList(pair_margins.RankedList):
    """Leaves out pairs of equal embeddings, at distance 0."""

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        distinct = similarity > 0
        losses, _ = super().rows(similarity, positive & distinct, negative & distinct)
        return losses, positive.any(1) | negative.any(1)


class Native(NamedTuple):
    """This library's loss of the same formula, and how its settings are read from the other loss."""

    kind: type[Loss]
    readers: tuple[read.Reader, ...] = ()
    reductions: Mapping[str, read.Settings] = read.MEAN_OR_SUM


def _by_hand(native: str) -> str:
    return f"construct contrastive_zoo.{native} by name."


_cosine, _unit_squared = read.of_unit_rows(read.similarity), read.of_unit_rows(read.squared_euclidean)
_margin_and_scale = read.numbers("margin", "scale")
_margins = read.numbers("pos_margin", "neg_margin")
_temperature, _softmax_scale = read.numbers("temperature"), read.inverse(temperature="softmax_scale")

LOSSES: dict[type[nn.Module], Native | str] = {
    losses.AngularLoss: "it compares unit rows with negatives that are not normalised, this library's all unit rows.",
    losses.ArcFaceLoss: Native(ArcFace, (_margin_and_scale, _cosine)),
    losses.CircleLoss: Native(Circle, (read.numbers("m", "gamma"), read.similarity), read.NONZERO_OR_SUM),
    losses.ContrastiveLoss: Native(Contrastive, (_margins, read.any_metric), read.AVERAGES),
    losses.CosFaceLoss: Native(CosFace, (_margin_and_scale, _cosine)),
    losses.CrossBatchMemory: "translate its loss, and wrap that in this library's CrossBatchMemory.",
    losses.DynamicSoftMarginLoss: _by_hand("DynamicSoftMargin"),
    losses.FastAPLoss: Native(FastAP, (lambda x: {"num_bins": x.num_bins}, read.squared_euclidean)),
    losses.GeneralizedLiftedStructureLoss: "anchors without a positive count with the half of the formula they have.",
    losses.HistogramLoss: _by_hand("Histogram"),
    losses.InstanceLoss: "Instance of this library is another function, a classifier of instances.",
    losses.IntraPairVarianceLoss: _by_hand("IntraPairVariance"),
    losses.LargeMarginSoftmaxLoss: _by_hand("LargeMarginSoftmax"),
    losses.LiftedStructureLoss: Native(LiftedStructure, (_margins, read.euclidean)),
    losses.ManifoldLoss: "this library has no such formula.",
    losses.MarginLoss: Native(
        Margin, (read.numbers("margin"), read.thresholds_by_class, read.euclidean), read.DIVISOR),
    losses.MultiSimilarityLoss: Native(MultiSimilarity, (read.numbers("alpha", "beta", "base"), read.similarity)),
    losses.NCALoss: Native(NCA, (_softmax_scale, read.squared_euclidean)),
    losses.NPairsLoss: Native(NPairs, (read.similarity,)),
    # with labels the loss leaves an anchor's other positives out of the denominator, as SINCERE does
    losses.NTXentLoss: Native(SINCERE, (_temperature, read.similarity, lambda _: {"average": "pairs"})),
    losses.NormalizedSoftmaxLoss: Native(NormalizedSoftmax, (_temperature, _cosine)),
    losses.P2SGradLoss: _by_hand("P2SGrad"),
    losses.PNPLoss: _by_hand("PNP"),
    losses.ProxyAnchorLoss: Native(ProxyAnchor, (read.numbers("margin", "alpha"), _cosine), read.DIVISOR),
    losses.ProxyNCALoss: Native(ProxyNCA, (_softmax_scale, _unit_squared)),
    losses.RankedListLoss: Native(
        RankedList,
        (read.numbers("margin", "alpha", "imbalance", t_p="Tp", t_n="Tn"), read.euclidean,
         lambda _: {"epsilon": 1e-5})),  # what it adds to each weight of its means
    losses.SignalToNoiseRatioContrastiveLoss: Native(SignalToNoise, (_margins, read.plain_ratio), read.AVERAGES),
    losses.SmoothAPLoss: "it follows its formula only where a batch has as many classes as rows of each.",
    losses.SoftTripleLoss: Native(
        SoftTriple, (read.numbers("la", "margin"), read.inverse(gamma="gamma"), _cosine, lambda _: {"tau": 0.0})),
    losses.SphereFaceLoss: _by_hand("SphereFace"),
    losses.SubCenterArcFaceLoss: Native(ArcFace, (_margin_and_scale, _cosine)),
    losses.SupConLoss: Native(SupCon, (_temperature, read.similarity), read.NONZERO),
    losses.ThresholdConsistentMarginLoss: _by_hand("ThresholdConsistentMargin"),
    losses.TripletMarginLoss: Native(Triplet, (read.numbers("margin"), read.triplets), read.AVERAGES),
    losses.TupletMarginLoss: Native(
        TupletMargin, (read.inverse(temperature="scale"), lambda x: {"margin": math.degrees(x.margin)}, _cosine)),
    losses.VICRegLoss: Native(
        VICReg,
        (read.numbers("eps", invariance="invariance_lambda", variance="variance_mu", covariance="covariance_v"),),
        read.MEAN),
}  # fmt: skip
"""All but MultipleLosses and SelfSupervisedLoss, which are what the losses inside them are."""
