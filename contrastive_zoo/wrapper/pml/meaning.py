"""What losses, distances, reducers and miners of pytorch-metric-learning mean; evaluation and translation read it here."""

from typing import Any, Literal

from pytorch_metric_learning import distances, losses, reducers
from torch import nn


def members(loss: Any) -> list[tuple[Any, Any, float]]:
    """Return each loss of a MultipleLosses, its own miner (None if it has none) and its weight."""
    keys = list(loss.losses) if loss.is_dict else range(len(loss.losses))
    own_miners = dict(loss.miners.items() if loss.is_dict else enumerate(loss.miners)) if loss.miners else {}
    return [(loss.losses[key], own_miners.get(key), loss.weights[key]) for key in keys]


COMPOSITES = (losses.MultipleLosses, losses.SelfSupervisedLoss)
"""Losses that consist of other losses."""

PAIR_LOSSES = (
    losses.ContrastiveLoss, losses.SignalToNoiseRatioContrastiveLoss, losses.MultiSimilarityLoss, losses.CircleLoss,
    losses.NTXentLoss, losses.SupConLoss, losses.GeneralizedLiftedStructureLoss, losses.TupletMarginLoss,
    losses.AngularLoss,
)  # fmt: skip
"""Losses whose values are those of pairs."""
COLUMNS = (
    losses.AngularLoss, losses.CircleLoss, losses.GeneralizedLiftedStructureLoss, losses.LiftedStructureLoss,
    losses.MultiSimilarityLoss, losses.TupletMarginLoss,
)  # fmt: skip
"""Losses that hand a reducer a column ``[n, 1]``, which spreads against a reducer's row of numbers."""
TRIPLET_LOSSES = (losses.TripletMarginLoss, losses.MarginLoss)
CLASSIFIERS = (
    losses.ArcFaceLoss, losses.CosFaceLoss, losses.LargeMarginSoftmaxLoss, losses.NormalizedSoftmaxLoss,
    losses.ProxyNCALoss, losses.SoftTripleLoss, losses.SphereFaceLoss, losses.SubCenterArcFaceLoss,
)  # fmt: skip
"""Losses that compare samples with weights of classes."""
TAKE_NO_INDICES = (losses.InstanceLoss, losses.P2SGradLoss, losses.PNPLoss, losses.RankedListLoss)
TAKE_REFERENCES = (*PAIR_LOSSES, *TRIPLET_LOSSES, losses.NCALoss, losses.IntraPairVarianceLoss)

PAIRWISE_DISTANCES = (
    distances.CosineSimilarity, distances.DotProductSimilarity, distances.LpDistance, distances.SNRDistance,
)  # fmt: skip
"""Distances of one pair, which depend on no other sample of the batch."""

Metric = Literal["distance", "squared distance", "similarity"]


def metric_of(distance: Any) -> Metric | None:
    """Return which of this library's metrics a distance is; None if it is none of them."""
    if type(distance) is distances.LpDistance and distance.p == 2 and distance.power in (1, 2):
        return "distance" if distance.power == 1 else "squared distance"
    is_similarity = type(distance) in (distances.CosineSimilarity, distances.DotProductSimilarity)
    return "similarity" if is_similarity and distance.power == 1 else None


def spelled(distance: Any) -> str:
    """Return the distance as an error message names it."""
    settings = {name: getattr(distance, name, None) for name in ("p", "power")}
    return f"{type(distance).__name__}({', '.join(f'{name}={x}' for name, x in settings.items())})"


Reduction = Literal["mean", "sum", "threshold", "nonzero", "divisor", "class weights", "each anchor"]

_REDUCTIONS: dict[type[nn.Module], Reduction] = {
    reducers.AvgNonZeroReducer: "threshold",
    reducers.ClassWeightedReducer: "class weights",
    reducers.DivisorReducer: "divisor",
    reducers.MeanReducer: "mean",
    reducers.PerAnchorReducer: "each anchor",
    reducers.SumReducer: "sum",
    reducers.ThresholdReducer: "threshold",
}


def reduction_of(reducer: Any) -> Reduction | None:
    """Return what a reducer computes: a sum over a count, which ranks can add up; None if it is not known to be one.

    ``"nonzero"`` is the mean of the losses above 0, ``"threshold"`` that of losses between other bounds.
    """
    found = _REDUCTIONS.get(type(reducer))
    return "nonzero" if found == "threshold" and reducer.low == 0 and reducer.high is None else found


def reducer_of(reducer: Any, sub_loss: str) -> Any:
    """Return the reducer of one of a loss's parts."""
    if type(reducer) is not reducers.MultipleReducers:
        return reducer
    return dict(reducer.reducers).get(sub_loss, reducer.default_reducer)
