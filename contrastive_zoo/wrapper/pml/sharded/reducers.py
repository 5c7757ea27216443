"""Reducers of pytorch-metric-learning over the losses of all ranks: a sum over a count for each sub-loss."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from contrastive_zoo.engine.batch import mean_divisor
from contrastive_zoo.engine.precision import sum_dtype
from contrastive_zoo.ranks.collectives import sum_over_ranks
from contrastive_zoo.wrapper.pml.meaning import Reduction, reducer_of, reduction_of
from contrastive_zoo.wrapper.pml.sharded.anchor_batch import AnchorBatch, Info


def reduced(reducer: Any, sub_losses: Mapping[str, Info], batch: AnchorBatch, *, connected: Sequence[Tensor]) -> Tensor:
    """Return what the reducer computes from all ranks' losses.

    ``connected`` tensors stay in the graph, so that every rank takes part in the backward pass.
    """
    nothing = torch.stack([x.flatten()[:0].sum(dtype=sum_dtype(x)) for x in connected]).sum()
    terms = [
        _sum_and_count(reducer, name, info, batch)
        if isinstance(info["losses"], Tensor)
        else (nothing, nothing.detach())
        for name, info in sub_losses.items()
    ]
    sums, counts = (torch.stack(x) for x in zip((nothing, nothing.detach()), *terms, strict=True))
    sums = sum_over_ranks(sums, gradient="complete", world=batch.world)
    counts = sum_over_ranks(counts, gradient="complete", world=batch.world)
    return (sums / mean_divisor(counts)).sum().to(batch.anchors.dtype)


def _sum_and_count(reducer: Any, name: str, info: Info, batch: AnchorBatch) -> tuple[Tensor, Tensor]:
    """Return this rank's part of a sub-loss's sum, and of the count that divides it."""
    if info["reduction_type"] == "already_reduced":
        value = info["losses"].sum(dtype=sum_dtype(info["losses"]))
        if "count" in info:
            return value, value.new_tensor(info["count"])
        once = batch.world.rank == 0  # every rank has the same value
        return value * once, value.new_tensor(once)
    values, count = _summands(reducer_of(reducer, name), info, batch)
    dtype = sum_dtype(values)
    count = count.to(dtype) if isinstance(count, Tensor) else values.new_full((), count, dtype=dtype)
    return values.sum(dtype=dtype), count


def already_averaged(values: Tensor, count: int) -> Info:
    """Return a sub-loss that is a mean and bypasses the reducer: this rank's values, and their part of the count."""
    return {"losses": values, "indices": None, "reduction_type": "already_reduced", "count": count}


def _mean(reducer: Any, info: Info, batch: AnchorBatch) -> tuple[Tensor, Any]:
    return info["losses"], len(info["losses"])


def _sum(reducer: Any, info: Info, batch: AnchorBatch) -> tuple[Tensor, Any]:
    return info["losses"], batch.world.rank == 0


def _between_thresholds(reducer: Any, info: Info, batch: AnchorBatch) -> tuple[Tensor, Any]:
    values = info["losses"]
    for bound, is_inside in ((reducer.low, torch.gt), (reducer.high, torch.lt)):
        values = values if bound is None else values[is_inside(values, bound)]
    return values, len(values)


def _weighted_by_class(reducer: Any, info: Info, batch: AnchorBatch) -> tuple[Tensor, Any]:
    values, anchors = info["losses"], info["indices"]
    weights = reducer.weights.to(values)
    anchors = anchors if isinstance(anchors, Tensor) else anchors[0]
    return batch.run_on_all_ranks(reducer, lambda: values * weights[batch.labels[anchors]]), len(values)


def _by_divisor(reducer: Any, info: Info, batch: AnchorBatch) -> tuple[Tensor, Any]:
    return info["losses"], info["divisor"]


def _per_anchor(reducer: Any, info: Info, batch: AnchorBatch) -> tuple[Tensor, Any]:
    if info["reduction_type"] != "element":
        is_pair = torch.zeros(len(batch.anchors), len(batch.candidates), dtype=torch.bool, device=batch.anchors.device)
        is_pair[info["indices"]] = True
        values = torch.zeros_like(is_pair, dtype=info["losses"].dtype).index_put(info["indices"], info["losses"])
        means = values.sum(1) / is_pair.sum(1).clamp(min=1)
        info = {"losses": means, "indices": batch.anchor_indices(), "reduction_type": "element"}
    return _summands(reducer.reducer, info, batch)


REDUCTIONS: dict[Reduction, Callable[[Any, Info, AnchorBatch], tuple[Tensor, Any]]] = {
    "class weights": _weighted_by_class,
    "divisor": _by_divisor,
    "each anchor": _per_anchor,
    "mean": _mean,
    "nonzero": _between_thresholds,
    "sum": _sum,
    "threshold": _between_thresholds,
}
"""The function that returns the summands and the count of a reduction."""


def _summands(reducer: Any, info: Info, batch: AnchorBatch) -> tuple[Tensor, Any]:
    reduction = reduction_of(reducer)
    assert reduction is not None  # refused otherwise
    return REDUCTIONS[reduction](reducer, info, batch)
