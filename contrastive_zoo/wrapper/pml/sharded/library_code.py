"""Losses whose own ``compute_loss`` evaluates the local anchors: sums over pairs, triplets or classified samples."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from pytorch_metric_learning import losses
from torch import Tensor

from contrastive_zoo.wrapper.pml.sharded.anchor_batch import AnchorBatch, Indices, Info
from contrastive_zoo.wrapper.pml.sharded.mining import miner_weights


def of_pairs(loss: Any, batch: AnchorBatch, indices: Indices | None) -> dict[str, Info]:
    """Evaluate a loss of pairs."""
    return _computed(loss, batch, batch.pairs(indices), enough=2)


def of_triplets(loss: Any, batch: AnchorBatch, indices: Indices | None) -> dict[str, Info]:
    """Evaluate a loss of triplets."""
    return _computed(loss, batch, batch.triplets(indices), enough=1)


def of_classes(loss: Any, batch: AnchorBatch, indices: Indices | None) -> dict[str, Info]:
    """Evaluate a classifier: each sample against the weights of classes."""
    weights = miner_weights(batch, indices, anchors_only=type(loss) is losses.ProxyNCALoss)
    padded = batch.with_padding(int(len(batch.anchors) == 0))
    arguments = (padded.anchors, padded.labels, None, padded.anchors, padded.labels)
    sub_losses = batch.run_on_all_ranks(loss, lambda: loss.compute_loss(*arguments))
    sub_losses["loss"] = local = _without_padding(sub_losses["loss"], len(batch.anchors), True)
    local["losses"] = local["losses"] * weights[local["indices"]]
    return sub_losses


def _computed(loss: Any, batch: AnchorBatch, groups: Sequence[Indices], *, enough: int) -> dict[str, Info]:
    """Return ``compute_loss`` of the local anchors; padding shows it pairs that only other ranks have.

    ``groups`` are pairs or triplets, by kind; with ``enough`` of a kind the library takes no other branch.
    """
    local = [len(group[0]) for group in groups]
    missing = padding_needed(local, batch.totals(*local), enough)
    padded = batch.with_padding(sum(missing))
    padding = torch.arange(len(batch.anchors), len(padded.anchors), device=batch.anchors.device).split(missing)
    indices = [
        torch.cat([x, anchors if position == 0 else torch.zeros_like(anchors)])
        for group, anchors in zip(groups, padding, strict=True)
        for position, x in enumerate(group)
    ]
    evaluate = functools.partial(loss.compute_loss, padded.anchors, padded.labels, tuple(indices))
    sub_losses = batch.run_on_all_ranks(loss, lambda: evaluate(batch.candidates, batch.candidate_labels))
    return {name: _without_padding(info, len(batch.anchors), any(local)) for name, info in sub_losses.items()}


def padding_needed(local: Sequence[int], totals: Sequence[int], enough: int) -> list[int]:
    """Return how many padding pairs of each kind a rank needs to take the branch of the whole batch."""
    return [max(0, min(enough, total) - x) for total, x in zip(totals, local, strict=True)]


def _without_padding(info: Info, anchors: int, has_pairs: bool) -> Info:
    """Return the sub-loss without the values of padding anchors."""
    values, indices, divisor = info["losses"], info["indices"], info.get("divisor")
    if isinstance(values, Tensor) and indices is not None:
        is_local = (indices if isinstance(indices, Tensor) else indices[0]) < anchors
        values = values[is_local]
        indices = indices[is_local] if isinstance(indices, Tensor) else tuple(x[is_local] for x in indices)
    info = {**info, "losses": values, "indices": indices}
    return info if divisor is None else {**info, "divisor": divisor if has_pairs else 0 * divisor}
