"""Miners of pytorch-metric-learning, called for the local anchors and the candidates of all ranks."""

from collections.abc import Callable
from typing import Any

import torch
from pytorch_metric_learning import miners
from torch import Tensor

from contrastive_zoo.engine.masked import masked_max, masked_min
from contrastive_zoo.ranks.collectives import sum_over_ranks
from contrastive_zoo.ranks.randomness import one_stream
from contrastive_zoo.wrapper.pml.meaning import PAIRWISE_DISTANCES
from contrastive_zoo.wrapper.pml.sharded.anchor_batch import AnchorBatch, Indices


def mined(miner: Any, batch: AnchorBatch) -> Indices | None:
    """Return what the miner chooses from all samples, restricted to the local anchors."""
    with torch.no_grad():
        if type(miner) in MINERS and type(miner.distance) in PAIRWISE_DISTANCES:
            chosen = batch.run_on_all_ranks(miner, lambda: MINERS[type(miner)](miner, batch))
            miner.output_assertion(chosen)  # it also counts them, for users who log the counts
            return chosen
        anchors = batch.all_anchors()
        with one_stream(batch.world, batch.anchors.device):
            references = (batch.candidates, batch.candidate_labels) if batch.has_references else ()
            chosen = batch.run_on_all_ranks(miner, lambda: miner(*anchors, *references))
    return local_indices(chosen, batch)


def local_indices(indices: Indices | None, batch: AnchorBatch) -> Indices | None:
    """Restrict indices of all samples to the local anchors, and count these from the first local one."""
    if indices is None:
        return None
    start, stop = batch.shards.start, batch.shards.start + batch.shards.size
    local = [[x[(group[0] >= start) & (group[0] < stop)] for x in group] for group in _groups(indices)]
    return tuple(x for anchors, *others in local for x in (anchors - start, *others))


def miner_weights(batch: AnchorBatch, indices: Indices | None, *, anchors_only: bool) -> Tensor:
    """Return how often the miner chose each local sample, relative to the most frequent sample of all ranks."""
    if indices is None:
        return batch.anchors.new_ones(len(batch.anchors))
    chosen = [
        x
        for anchors, *others in _groups(indices)
        for x in (anchors + batch.shards.start, *([] if anchors_only else others))
    ]
    counts = torch.bincount(torch.cat(chosen), minlength=batch.shards.total)
    counts = sum_over_ranks(counts, gradient="complete", world=batch.world)
    if batch.totals(sum(map(len, indices))) == [0]:
        return batch.anchors.new_ones(len(batch.anchors))
    return (counts.to(batch.anchors.dtype) / counts.max())[batch.shards.local]


def _groups(indices: Indices) -> list[Indices]:
    """Return the triplets, or the positive and the negative pairs."""
    return [indices] if len(indices) == 3 else [indices[:2], indices[2:]]


def _of_independent_pairs(miner: Any, batch: AnchorBatch) -> Indices:
    """Call a miner that judges each pair or triplet by itself, and drop those that pair an anchor with itself."""
    indices = miner(batch.anchors, batch.labels, batch.candidates, batch.candidate_labels)
    if batch.has_references:
        return indices
    anchors, positives, *negatives = indices
    other = positives != anchors + batch.shards.start
    if len(indices) == 3:
        return tuple(x[other] for x in indices)
    return (anchors[other], positives[other], *negatives)


def _batch_hard(miner: Any, batch: AnchorBatch) -> Indices:
    miner.reset_stats()
    distance = miner.distance(batch.anchors, batch.candidates)
    positives, negatives = batch.pairs(None)
    if distance.numel() == 0:
        return (positives[0],) * 3
    (_, p), has_positive = miner.get_positives(distance, *positives)
    (_, n), has_negative = miner.get_negatives(distance, *negatives)
    a = torch.where(has_positive & has_negative)[0]
    return a, p[a], n[a]


def _multi_similarity(miner: Any, batch: AnchorBatch) -> Indices:
    """Choose positives less similar than the most similar negative, and negatives more similar than the least positive."""
    miner.reset_stats()
    similarity = miner.distance(batch.anchors, batch.candidates)
    if not miner.distance.is_inverted:
        similarity = -similarity
    positive, negative = batch.masks()
    if similarity.numel() == 0:
        return (*torch.where(positive), *torch.where(negative))
    least, most = masked_min(similarity, positive)[:, None], masked_max(similarity, negative)[:, None]
    hard = positive & (similarity - miner.epsilon < most), negative & (similarity + miner.epsilon > least)
    return (*torch.where(hard[0]), *torch.where(hard[1]))


MINERS: dict[type, Callable[[Any, AnchorBatch], Indices]] = {
    miners.TripletMarginMiner: _of_independent_pairs,
    miners.PairMarginMiner: _of_independent_pairs,
    miners.AngularMiner: _of_independent_pairs,
    miners.BatchHardMiner: _batch_hard,
    miners.MultiSimilarityMiner: _multi_similarity,
}
"""Miners that treat each anchor separately; every rank calls any other miner on all samples."""
