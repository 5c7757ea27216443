"""What losses and reducers of pytorch-metric-learning mean; translation and sharded evaluation read it here."""

from typing import Any, Literal

from pytorch_metric_learning import reducers
from torch import nn

EPSILON = 1e-5  # what RankedListLoss adds to each weight of its means


def members(loss: Any) -> list[tuple[Any, Any, float]]:
    """Return each loss of a MultipleLosses, its own miner (None if it has none) and its weight."""
    keys = list(loss.losses) if loss.is_dict else range(len(loss.losses))
    own_miners = dict(loss.miners.items() if loss.is_dict else enumerate(loss.miners)) if loss.miners else {}
    return [(loss.losses[key], own_miners.get(key), loss.weights[key]) for key in keys]


Reduction = Literal["mean", "sum", "threshold", "nonzero", "divisor", "class weights", "each anchor"]

REDUCTIONS: dict[type[nn.Module], Reduction] = {
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
    reduction = REDUCTIONS.get(type(reducer))
    return "nonzero" if reduction == "threshold" and reducer.low == 0 and reducer.high is None else reduction


def reducer_of(reducer: Any, sub_loss: str) -> Any:
    if type(reducer) is not reducers.MultipleReducers:
        return reducer
    return dict(reducer.reducers).get(sub_loss, reducer.default_reducer)
