"""The sub-losses of the local anchors, by the library's own ``compute_loss`` or written anew.

Code of the library that needs anchors and candidates to be one tensor is written anew: by this library's row functions
where it has the formula, otherwise after the library's code.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pytorch_metric_learning import losses
from torch import Tensor

from contrastive_zoo.engine.anchor_block import class_numbers
from contrastive_zoo.engine.masked import masked_log_sum_exp
from contrastive_zoo.engine.row_statistics import complete
from contrastive_zoo.losses.ranking import PNP, FastAP
from contrastive_zoo.ranks.collectives import all_gather, sum_over_ranks
from contrastive_zoo.ranks.differences import failing_together
from contrastive_zoo.ranks.transport import gather_rows
from contrastive_zoo.wrapper.pml.native.settings import EPSILON
from contrastive_zoo.wrapper.pml.native.variants import RankedList
from contrastive_zoo.wrapper.pml.sharded.anchor_batch import AnchorBatch, Indices, Info, miner_weights


def of_pairs(loss: Any, batch: AnchorBatch, indices: Indices | None) -> dict[str, Info]:
    return _computed(loss, batch, batch.pairs(indices), enough=2)


def of_triplets(loss: Any, batch: AnchorBatch, indices: Indices | None) -> dict[str, Info]:
    return _computed(loss, batch, batch.triplets(indices), enough=1)


def of_classes(loss: Any, batch: AnchorBatch, indices: Indices | None) -> dict[str, Info]:
    weights = miner_weights(batch, indices, anchors_only=type(loss) is losses.ProxyNCALoss)
    padded = batch.with_padding(int(len(batch.anchors) == 0))
    arguments = (padded.anchors, padded.labels, None, padded.anchors, padded.labels)
    evaluate = partial(loss.compute_loss, *arguments)
    sub_losses = failing_together(type(loss).__name__, evaluate, batch.world)
    sub_losses["loss"] = local = _without_padding(sub_losses["loss"], len(batch.anchors), True)
    local["losses"] = local["losses"] * weights[local["indices"]]
    return sub_losses


def _computed(loss: Any, batch: AnchorBatch, groups: Sequence[Indices], *, enough: int) -> dict[str, Info]:
    """Return ``compute_loss`` of local anchors; padding to ``enough`` shows it kinds that only other ranks have."""
    local = [len(group[0]) for group in groups]
    missing = padding_needed(local, batch.totals(*local), enough)
    padded = batch.with_padding(sum(missing))
    padding = torch.arange(len(batch.anchors), len(padded.anchors), device=batch.anchors.device).split(missing)
    indices = [
        torch.cat([x, anchors if position == 0 else torch.zeros_like(anchors)])
        for group, anchors in zip(groups, padding, strict=True)
        for position, x in enumerate(group)
    ]
    candidates = batch.candidates, batch.candidate_labels
    evaluate = partial(loss.compute_loss, padded.anchors, padded.labels, tuple(indices), *candidates)
    sub_losses = failing_together(type(loss).__name__, evaluate, batch.world)
    return {name: _without_padding(info, len(batch.anchors), any(local)) for name, info in sub_losses.items()}


def padding_needed(local: Sequence[int], totals: Sequence[int], enough: int) -> list[int]:
    """Return how many padding pairs of each kind a rank needs to take the branch of the whole batch."""
    return [max(0, min(enough, total) - x) for total, x in zip(totals, local, strict=True)]


def _without_padding(info: Info, anchors: int, has_pairs: bool) -> Info:
    values, indices, divisor = info["losses"], info["indices"], info.get("divisor")
    if isinstance(values, Tensor) and indices is not None:
        is_local = (indices if isinstance(indices, Tensor) else indices[0]) < anchors
        values = values[is_local]
        indices = indices[is_local] if isinstance(indices, Tensor) else tuple(x[is_local] for x in indices)
    info = {**info, "losses": values, "indices": indices}
    return info if divisor is None else {**info, "divisor": divisor if has_pairs else 0 * divisor}


def _of_anchors(values: Tensor, anchors: Tensor | None = None) -> dict[str, Info]:
    """Return the losses of these anchors, or of all local ones, as the only sub-loss."""
    anchors = torch.arange(len(values), device=values.device) if anchors is None else anchors
    return {"loss": {"losses": values, "indices": anchors, "reduction_type": "element"}}


def _already_averaged(values: Tensor, count: int) -> Info:
    """Return a sub-loss that is a mean and bypasses the reducer: this rank's values, and their part of the count."""
    return {"losses": values, "indices": None, "reduction_type": "already_reduced", "count": count}


def lifted_structure(loss: Any, batch: AnchorBatch, indices: Indices | None) -> dict[str, Info]:
    """Compare each positive pair with the negatives of both its samples; those of the positive come by a message."""
    (a, p), (a2, n) = batch.pairs(indices)
    if 0 in (totals := batch.totals(len(a), len(a2))) or max(totals) < 2:
        return {}
    distance = loss.distance(batch.anchors, batch.candidates)
    # triplets repeat pairs
    times = torch.zeros_like(distance).index_put((a2, n), distance.new_ones(()), accumulate=True)
    margins = loss.distance.margin(loss.neg_margin, distance) + times.clamp(min=1).log()
    negatives = masked_log_sum_exp(margins, times > 0)
    all_negatives = all_gather(negatives, shards=batch.shards, process_group=batch.world)
    both = torch.stack([negatives[a], all_negatives[p]], 1)
    of_pair = masked_log_sum_exp(both, both.isfinite(), empty=0.0)
    values = (of_pair + loss.distance.margin(distance[a, p], loss.pos_margin)).relu().square() / 2
    return {"loss": {"losses": values, "indices": (a, p), "reduction_type": "pos_pair"}}


def nca(loss: Any, batch: AnchorBatch, indices: Indices | None) -> dict[str, Info]:
    """Compare an anchor's positives with all its candidates; anchors whose probability is 0 in this dtype are left out."""
    weights = miner_weights(batch, indices, anchors_only=batch.has_references)
    if batch.shards.total < 2:
        return {}
    distance = loss.distance(batch.anchors, batch.candidates)
    logits = loss.softmax_scale * (distance if loss.distance.is_inverted else -distance)
    positive, negative = batch.masks()
    values = masked_log_sum_exp(logits, positive | negative) - masked_log_sum_exp(logits, positive)
    (counted,) = torch.where((-values.detach()).exp() > 0)
    return _of_anchors(values[counted] * weights[counted], counted)


def fast_ap(loss: Any, batch: AnchorBatch, indices: Indices | None) -> dict[str, Info]:
    """Return 1 − the average precision of each anchor with a positive."""
    weights = miner_weights(batch, indices, anchors_only=False)
    squared = loss.distance(batch.anchors, batch.candidates) * (4 / 2**loss.distance.power)  # the histogram ends at 4
    values, valid = complete(FastAP(num_bins=loss.num_bins).rows(squared, *batch.masks()))
    (counted,) = torch.where(valid)
    return _of_anchors((values * weights)[counted], counted)


def pnp(loss: Any, batch: AnchorBatch, indices: Indices | None) -> dict[str, Info]:
    """Penalise the number of negatives before each positive, and before the anchor itself, in the anchor's ranking."""
    row_loss = PNP(variant=loss.variant, temperature=loss.anneal, alpha=loss.alpha, b=loss.b, with_self=True)
    values, valid = row_loss.rows(loss.distance(batch.anchors, batch.candidates), *batch.masks())
    return {"loss": _already_averaged(values[valid], int(valid.sum()))}


def ranked_list(loss: Any, batch: AnchorBatch, indices: Indices | None) -> dict[str, Info]:
    """Compare each anchor with the positives and negatives that violate a margin."""
    row_loss = RankedList(epsilon=EPSILON)
    # attributes are not checked: the library takes any number, and a negative T_p or T_n, too
    row_loss.margin, row_loss.alpha, row_loss.imbalance = loss.margin, loss.alpha, loss.imbalance
    row_loss.t_p, row_loss.t_n = loss.Tp, loss.Tn
    values, _ = complete(row_loss.rows(loss.distance(batch.anchors, batch.candidates), *batch.masks()))
    return _of_anchors(values)


def intra_pair_variance(loss: Any, batch: AnchorBatch, indices: Indices | None) -> dict[str, Info]:
    """Compare each pair with the mean of all pairs."""
    pairs = batch.pairs(indices)
    totals = batch.totals(*(len(a) for a, _ in pairs))
    if max(totals) < 2:
        return {}
    distance = loss.distance(batch.anchors, batch.candidates)
    local = [distance[pair] for pair in pairs]
    sums = sum_over_ranks(torch.stack([x.sum() for x in local]), gradient="partial", world=batch.world)
    sub_losses = {}
    for index, (sign, eps) in enumerate({"pos": loss.pos_eps, "neg": loss.neg_eps}.items()):
        inverted = loss.distance.is_inverted == (sign == "pos")
        variance = loss.variance_with_eps(local[index], sums[index] / max(1, totals[index]), eps, inverted)
        sub_losses[f"{sign}_loss"] = {
            "losses": variance.relu().square(), "indices": pairs[index], "reduction_type": f"{sign}_pair"
        }  # fmt: skip
    return sub_losses


def instance(loss: Any, batch: AnchorBatch, indices: Indices | None) -> dict[str, Info]:
    """Return the cross-entropy over the candidates, of which the library takes the k-th for the k-th class."""
    numbers, _ = class_numbers(batch.candidate_labels)
    logits = loss.distance(batch.anchors, batch.candidates) * loss.gamma
    values = F.cross_entropy(logits, numbers[batch.shards.local], reduction="none")
    return _of_anchors(values)


def n_pairs(loss: Any, batch: AnchorBatch, indices: Indices | None) -> dict[str, Info]:
    """Take the first pair of each class in rank order; its anchor must find its positive among all those positives."""
    a, p = batch.pairs(indices)[0]
    start, stop = batch.shards.start, batch.shards.start + batch.shards.size
    local = _first_of_each_label(torch.stack([batch.labels[a], a + start, p], 1))
    pairs = _first_of_each_label(gather_rows(local, batch.world.shards(len(local)), batch.world))
    loss.num_pairs = len(pairs)
    positions = torch.where((pairs[:, 1] >= start) & (pairs[:, 1] < stop))[0]
    anchors = pairs[positions, 1] - start
    if len(pairs) == 0:
        return {}
    similarity = loss.distance(batch.anchors[anchors], batch.candidates[pairs[:, 2]])
    logits = similarity if loss.distance.is_inverted else -similarity
    return _of_anchors(F.cross_entropy(logits, positions, reduction="none"), anchors)


def _first_of_each_label(pairs: Tensor) -> Tensor:
    """Return the first row of each label from rows of [label, anchor, positive]."""
    _, first = np.unique(pairs[:, 0].cpu().numpy(), return_index=True)
    return pairs[torch.from_numpy(first).to(pairs.device)]


def threshold_consistent(loss: Any, batch: AnchorBatch, indices: Indices | None) -> dict[str, Info]:
    """Return the mean violation of the positive and of the negative margin."""
    sub_losses = {}
    for name, (a, other), sign in zip(("plus", "minus"), batch.pairs(indices), (-1, 1), strict=True):
        cosine = F.cosine_similarity(batch.anchors[a], batch.candidates[other])
        violation = sign * (cosine - getattr(loss, f"margin_{name}"))
        violation = violation[violation >= 0]
        sub_losses[name] = _already_averaged(getattr(loss, f"lambda_{name}") * violation, len(violation))
    return sub_losses


def p2s_grad(loss: Any, batch: AnchorBatch, indices: Indices | None) -> dict[str, Info]:
    """Return the mean over classes of (cos − [own class])²; the loss's weights are unit columns already."""

    def squared_errors() -> Tensor:
        cosines = (batch.anchors @ loss.weight / batch.anchors.square().sum(1).sqrt()[:, None]).clamp(-1, 1)
        own_class = torch.zeros_like(cosines).scatter_(1, batch.labels[:, None], 1)
        return (cosines - own_class).square().mean(1)

    return {"loss": _already_averaged(failing_together("P2SGradLoss", squared_errors, batch.world), len(batch.anchors))}
