"""The local anchors and the candidates of all ranks: their masks, pairs and triplets, and what miners choose of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from pytorch_metric_learning import distances, miners
from pytorch_metric_learning.utils import loss_and_miner_utils as lmu
from torch import Tensor

from contrastive_zoo.engine.masked import masked_max, masked_min
from contrastive_zoo.engine.masks import block_masks
from contrastive_zoo.ranks.collectives import all_gather, sum_over_ranks
from contrastive_zoo.ranks.differences import failing_together
from contrastive_zoo.ranks.one_process import in_one_process
from contrastive_zoo.ranks.randomness import one_stream
from contrastive_zoo.ranks.transport import gather_rows
from contrastive_zoo.ranks.world import Shards, World

Indices = tuple[Tensor, ...]
"""(anchors, positives, negatives) or (anchors, positives, anchors, negatives).

Anchors index local embeddings, positives and negatives index the gathered candidates.
"""
Info = dict[str, Any]
"""A sub-loss in the library's terms: ``losses``, ``indices``, ``reduction_type``, perhaps a ``divisor``."""

PAIRWISE_DISTANCES = (
    distances.CosineSimilarity, distances.DotProductSimilarity, distances.LpDistance, distances.SNRDistance,
)  # fmt: skip
"""Distances of one pair, which depend on no other sample of the batch."""


@dataclass(frozen=True)
class AnchorBatch:
    anchors: Tensor
    labels: Tensor
    candidates: Tensor
    candidate_labels: Tensor
    shards: Shards
    has_references: bool  # whether candidates are other samples than anchors
    world: World

    @classmethod
    def of(cls, arguments: Mapping[str, Any], shards: Mapping[str, Shards], world: World) -> "AnchorBatch":
        anchors = arguments["embeddings"]
        has_references = arguments.get("ref_emb") is not None
        names = ("ref_emb", "ref_labels") if has_references else ("embeddings", "labels")
        local = [arguments[name].to(anchors.device) for name in names]  # labels may be on the CPU
        candidates, candidate_labels = (
            all_gather(x, shards=shards[name], process_group=world) for name, x in zip(names, local, strict=True)
        )
        labels = arguments["labels"].to(anchors.device)
        return cls(anchors, labels, candidates, candidate_labels, shards["embeddings"], has_references, world)

    def all_anchors(self) -> tuple[Tensor, Tensor]:
        if not self.has_references:
            return self.candidates, self.candidate_labels
        shards, world = self.shards, self.world
        return all_gather(self.anchors, shards=shards, process_group=world), gather_rows(self.labels, shards, world)

    def masks(self) -> tuple[Tensor, Tensor]:
        """Return which candidates are an anchor's positives, and which are its negatives."""
        if self.has_references:
            same = self.labels[:, None] == self.candidate_labels
            return same, ~same
        _, positive, negative = block_masks(self.labels, self.candidate_labels, self.shards.start)
        return positive, negative

    def pairs(self, indices: Indices | None) -> list[Indices]:
        """Return the mined (anchor, positive) and (anchor, negative) pairs; all pairs if ``indices`` is None."""
        if indices is None:
            positive, negative = self.masks()
            return [torch.where(positive), torch.where(negative)]
        a1, p, a2, n = lmu.convert_to_pairs(indices, self.labels)
        return [(a1, p), (a2, n)]

    def triplets(self, indices: Indices | None) -> list[Indices]:
        """Return the mined triplets; all triplets if ``indices`` is None."""
        if indices is not None:
            return [lmu.convert_to_triplets(indices, self.labels)]
        positive, negative = self.masks()
        a, p = torch.where(positive)
        negatives_of = negative.sum(1)
        counts, first = negatives_of[a], (negatives_of.cumsum(0) - negatives_of)[a]
        pair = torch.arange(len(a), device=a.device).repeat_interleave(counts)
        nth = torch.arange(len(pair), device=a.device) - (counts.cumsum(0) - counts)[pair]
        return [(a[pair], p[pair], torch.where(negative)[1][first[pair] + nth])]

    def with_padding(self, count: int) -> "AnchorBatch":
        """Return the batch with ``count`` padding anchors after the local ones, so that there is something to evaluate."""
        if count == 0:
            return self
        filler = torch.arange(1, self.anchors.shape[1] + 1, dtype=self.anchors.dtype, device=self.anchors.device)
        labels = torch.cat([self.labels, self.candidate_labels[:1].expand(count)])
        return replace(self, anchors=torch.cat([self.anchors, filler.expand(count, -1)]), labels=labels)

    def totals(self, *local: int) -> list[int]:
        return [sum(counts) for counts in zip(*self.world.exchange(local), strict=True)]


def mined(miner: Any, batch: AnchorBatch) -> Indices | None:
    """Return what the miner chooses from all samples, restricted to the local anchors."""
    name = type(miner).__name__
    with torch.no_grad():
        if type(miner) in MINERS and type(miner.distance) in PAIRWISE_DISTANCES:
            chosen = failing_together(name, partial(MINERS[type(miner)], miner, batch), batch.world)
            miner.output_assertion(chosen)  # it also counts them, for users who log the counts
            return chosen
        anchors = batch.all_anchors()
        with one_stream(batch.world, batch.anchors.device):
            references = (batch.candidates, batch.candidate_labels) if batch.has_references else ()
            mine = partial(miner, *anchors, *references)
            chosen = failing_together(name, partial(in_one_process, mine, name, batch.world), batch.world)
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
