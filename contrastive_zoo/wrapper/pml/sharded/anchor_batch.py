"""The local anchors and the candidates of all ranks: their masks, pairs and triplets."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from pytorch_metric_learning.utils import loss_and_miner_utils as lmu
from torch import Tensor, nn

from contrastive_zoo.engine.masks import block_masks
from contrastive_zoo.ranks.collectives import all_gather
from contrastive_zoo.ranks.transport import gather_rows
from contrastive_zoo.ranks.world import Shards, World

Indices = tuple[Tensor, ...]
"""(anchors, positives, negatives) or (anchors, positives, anchors, negatives).

Anchors index local embeddings, positives and negatives index the gathered candidates.
"""
Info = dict[str, Any]
"""A sub-loss in the library's terms: ``losses``, ``indices``, ``reduction_type``, perhaps a ``divisor``."""
R = TypeVar("R")


@dataclass(frozen=True)
class AnchorBatch:
    """The local anchors, and the gathered candidates."""

    anchors: Tensor
    labels: Tensor
    candidates: Tensor
    candidate_labels: Tensor
    shards: Shards
    """Of the anchors."""
    has_references: bool
    """Whether candidates are other samples than anchors."""
    world: World

    @classmethod
    def of(cls, arguments: Mapping[str, Any], shards: Mapping[str, Shards], world: World) -> "AnchorBatch":
        """Gather the candidates."""
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
        """Return all ranks' anchors and their labels."""
        if not self.has_references:
            return self.candidates, self.candidate_labels
        shards, world = self.shards, self.world
        return all_gather(self.anchors, shards=shards, process_group=world), gather_rows(self.labels, shards, world)

    def anchor_indices(self) -> Tensor:
        """Return 0 … n − 1 for the n local anchors."""
        return torch.arange(len(self.anchors), device=self.anchors.device)

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

    def run_on_all_ranks(self, caller: nn.Module, function: Callable[[], R]) -> R:
        """Return ``function()``; if it raises on one rank, every rank raises, since it would wait in the next message.

        Raises:
            ValueError: on every rank alike, the errors by rank; on one process the exception itself.
        """
        if self.world.size == 1:
            return function()
        result, error = None, None
        try:
            result = function()
        except Exception as raised:
            error = raised
        if any(failed for (failed,) in self.world.exchange([error is not None])):
            texts = self.world.exchange_text("" if error is None else f"{type(error).__name__}: {error}")
            errors = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
            raise ValueError(f"{type(caller).__name__}: it raised {errors}") from error
        return cast("R", result)

    def totals(self, *local: int) -> list[int]:
        """Return the sum of each number over ranks."""
        return [sum(counts) for counts in zip(*self.world.exchange(local), strict=True)]
