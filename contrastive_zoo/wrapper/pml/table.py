"""What each loss of pytorch-metric-learning means: how it is evaluated in shards, and which loss of this library it is."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pytorch_metric_learning import losses
from torch import nn

from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.losses.class_softmax import ArcFace, CosFace, NormalizedSoftmax, ProxyAnchor, ProxyNCA, SoftTriple
from contrastive_zoo.losses.multi_positive import NPairs
from contrastive_zoo.losses.pair_margins import Contrastive, Margin, SignalToNoise
from contrastive_zoo.losses.ranking import FastAP
from contrastive_zoo.losses.redundancy import VICReg
from contrastive_zoo.losses.soft_margins import LiftedStructure, MultiSimilarity
from contrastive_zoo.losses.sup_con import NCA, SINCERE, SupCon, TupletMargin
from contrastive_zoo.wrapper.pml.native import settings as read
from contrastive_zoo.wrapper.pml.native import variants
from contrastive_zoo.wrapper.pml.sharded import anchor_losses as sharded
from contrastive_zoo.wrapper.pml.sharded.anchor_batch import AnchorBatch, Indices, Info


class Meaning(NamedTuple):
    """A loss of pytorch-metric-learning."""

    evaluate: Callable[[Any, AnchorBatch, Indices | None], dict[str, Info]] | str
    """Returns the sub-losses of the local anchors; or why ranks cannot evaluate their anchors alone."""
    native: type[Loss] | str
    """This library's loss of the same formula; or why there is none."""
    readers: tuple[read.Reader, ...] = ()
    reductions: Mapping[str, read.Settings] = read.MEAN_OR_SUM


def _by_hand(native: str) -> str:
    return f"construct contrastive_zoo.{native} by name."


_cosine, _unit_squared = read.of_unit_rows(read.similarity), read.of_unit_rows(read.squared_euclidean)
_margin_and_scale = read.numbers("margin", "scale")
_margins = read.numbers("pos_margin", "neg_margin")
_temperature, _softmax_scale = read.numbers("temperature"), read.inverse(temperature="softmax_scale")

LOSSES: dict[type[nn.Module], Meaning] = {
    losses.AngularLoss: Meaning(
        sharded.of_pairs, "it compares unit rows with negatives that are not normalised, this library's all unit rows."),
    losses.ArcFaceLoss: Meaning(sharded.of_classes, ArcFace, (_margin_and_scale, _cosine)),
    losses.CircleLoss: Meaning(
        sharded.of_pairs, variants.Circle, (read.numbers("m", "gamma"), read.similarity), read.NONZERO_OR_SUM),
    losses.ContrastiveLoss: Meaning(sharded.of_pairs, Contrastive, (_margins, read.any_metric), read.AVERAGES),
    losses.CosFaceLoss: Meaning(sharded.of_classes, CosFace, (_margin_and_scale, _cosine)),
    losses.CrossBatchMemory: Meaning(
        "its queue holds rows without gradient, whose owners it does not know.",
        "translate its loss, and wrap that in this library's CrossBatchMemory."),
    losses.DynamicSoftMarginLoss: Meaning(
        "its histogram of all pairs is kept from call to call.", _by_hand("DynamicSoftMargin")),
    losses.FastAPLoss: Meaning(sharded.fast_ap, FastAP, (lambda x: {"num_bins": x.num_bins}, read.squared_euclidean)),
    losses.GeneralizedLiftedStructureLoss: Meaning(
        sharded.of_pairs, "anchors without a positive count with the half of the formula they have."),
    losses.HistogramLoss: Meaning("its histograms are of all pairs.", _by_hand("Histogram")),
    losses.InstanceLoss: Meaning(
        sharded.instance, "Instance of this library is another function, a classifier of instances."),
    losses.IntraPairVarianceLoss: Meaning(sharded.intra_pair_variance, _by_hand("IntraPairVariance")),
    losses.LargeMarginSoftmaxLoss: Meaning(sharded.of_classes, _by_hand("LargeMarginSoftmax")),
    losses.LiftedStructureLoss: Meaning(sharded.lifted_structure, LiftedStructure, (_margins, read.euclidean)),
    losses.ManifoldLoss: Meaning("its random walk goes over all rows.", "this library has no such formula."),
    losses.MarginLoss: Meaning(
        sharded.of_triplets, Margin,
        (read.numbers("margin"), read.thresholds_by_class, read.euclidean), read.DIVISOR),
    losses.MultiSimilarityLoss: Meaning(
        sharded.of_pairs, MultiSimilarity, (read.numbers("alpha", "beta", "base"), read.similarity)),
    losses.NCALoss: Meaning(sharded.nca, NCA, (_softmax_scale, read.squared_euclidean)),
    losses.NPairsLoss: Meaning(sharded.n_pairs, NPairs, (read.similarity,)),
    # with labels the loss leaves an anchor's other positives out of the denominator, as SINCERE does
    losses.NTXentLoss: Meaning(
        sharded.of_pairs, SINCERE, (_temperature, read.similarity, lambda _: {"average": "pairs"})),
    losses.NormalizedSoftmaxLoss: Meaning(sharded.of_classes, NormalizedSoftmax, (_temperature, _cosine)),
    losses.P2SGradLoss: Meaning(sharded.p2s_grad, _by_hand("P2SGrad")),
    losses.PNPLoss: Meaning(sharded.pnp, _by_hand("PNP")),
    losses.ProxyAnchorLoss: Meaning(
        "its anchors are proxies, and a proxy's sums are over all rows.",
        ProxyAnchor, (read.numbers("margin", "alpha"), _cosine), read.DIVISOR),
    losses.ProxyNCALoss: Meaning(sharded.of_classes, ProxyNCA, (_softmax_scale, _unit_squared)),
    losses.RankedListLoss: Meaning(
        sharded.ranked_list, variants.RankedList,
        (read.numbers("margin", "alpha", "imbalance", t_p="Tp", t_n="Tn"), read.euclidean,
         lambda _: {"epsilon": read.EPSILON})),
    losses.SignalToNoiseRatioContrastiveLoss: Meaning(
        sharded.of_pairs, SignalToNoise, (_margins, read.plain_ratio), read.AVERAGES),
    losses.SmoothAPLoss: Meaning(
        "it takes blocks of equal classes.",
        "it follows its formula only where a batch has as many classes as rows of each."),
    losses.SoftTripleLoss: Meaning(
        sharded.of_classes, SoftTriple,
        (read.numbers("la", "margin"), read.inverse(gamma="gamma"), _cosine, lambda _: {"tau": 0.0})),
    losses.SphereFaceLoss: Meaning(sharded.of_classes, _by_hand("SphereFace")),
    losses.SubCenterArcFaceLoss: Meaning(sharded.of_classes, ArcFace, (_margin_and_scale, _cosine)),
    losses.SupConLoss: Meaning(
        sharded.of_pairs, SupCon, (_temperature, read.similarity), read.NONZERO),
    losses.ThresholdConsistentMarginLoss: Meaning(sharded.threshold_consistent, _by_hand("ThresholdConsistentMargin")),
    losses.TripletMarginLoss: Meaning(
        sharded.of_triplets, variants.Triplet, (read.numbers("margin"), read.triplets), read.AVERAGES),
    losses.TupletMarginLoss: Meaning(
        sharded.of_pairs, TupletMargin,
        (read.inverse(temperature="scale"), lambda x: {"margin": math.degrees(x.margin)}, _cosine)),
    losses.VICRegLoss: Meaning(
        "its variances and covariances are of all rows.", VICReg,
        (read.numbers("eps", invariance="invariance_lambda", variance="variance_mu", covariance="covariance_v"),),
        read.MEAN),
}  # fmt: skip
"""All but MultipleLosses and SelfSupervisedLoss, which are what the losses inside them are."""
