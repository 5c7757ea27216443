"""Sums over all pairs of two sets of embeddings, block by block: the N × N matrix of similarities never exists."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from contrastive_zoo.metrics.exact import similarities
from contrastive_zoo.metrics.rounds import rounds
from contrastive_zoo.ranks.transport import gather_rows
from contrastive_zoo.ranks.world import Shards, World

BINS = 2048
"""Bins of similarities between −1 and 1: 2^-10 wide, so that a quantile, a bin's centre, is at most 2^-11 off."""

CANDIDATES = 2048
"""Rows of all ranks that are compared at once with a block of this rank's rows."""

_BLOCK = 2**20
"""Similarities of a block; 8 MiB in float64, of which about ten are alive."""

_POSITIVE, _NEGATIVE, _ITSELF = range(3)


@dataclass(frozen=True)
class Block:
    """Some of this rank's rows and a round of the candidates of all ranks.

    Args:
        rows: which of this rank's rows.
        start: the index of the first candidate among those of all ranks.
        candidates: what was gathered for the candidates.
    """

    rows: slice
    start: int
    candidates: Tensor

    def is_itself(self, shards: Shards) -> Tensor:
        """Return where a candidate has the index of the row, as a boolean matrix."""
        rows = torch.arange(self.rows.start, self.rows.stop, device=self.candidates.device) + shards.start
        candidates = torch.arange(self.start, self.start + len(self.candidates), device=self.candidates.device)
        return rows[:, None] == candidates


def blocks(rows: Tensor, shards: Shards, world: World) -> Iterator[Block]:
    """Yield the blocks of this rank's rows and the gathered ``rows`` of all ranks; every rank gathers equally often."""
    for index, of_round in enumerate(rounds(shards, world, size=CANDIDATES)):
        own = rows[of_round.local].to(world.device).contiguous()
        gathered = gather_rows(own, of_round.shards, world).to(rows.device)
        height = max(1, _BLOCK // len(gathered))
        for start in range(0, len(rows), height):
            yield Block(slice(start, min(start + height, len(rows))), index * CANDIDATES, gathered)


def pair_sums(
    anchors: Tensor, candidates: Tensor, labels: Tensor | None, shards: Shards, world: World
) -> dict[str, Tensor]:
    """Return this rank's sums over the pairs of its anchors with the candidates of all ranks.

    Args:
        anchors: [n, d] of unit length in float64.
        candidates: [n, d], this rank's; the anchors themselves if there are labels.
        labels: [n]; candidates with the anchor's label are positive, and the anchor itself is no pair. None: the
            candidate with the anchor's index is positive.
        shards: the split of both.
        world: the ranks.

    Returns:
        By name, in float64: ``counts`` [2, BINS] and ``sums`` [2] of positive and negative similarities; ``hits``: anchors
        whose best positive is more similar than every negative; ``without_positive``; ``beaten`` [N]: whether one of this
        rank's anchors is at least as similar to a candidate as its partner is, only without labels.
    """
    if labels is None:  # the bits of a block's, as both are functions of the two rows alone
        shared = similarities(anchors[:, None], candidates[:, None]).flatten(1)
    else:  # the bits of an int64, gathered with the rows
        shared = labels.long()[:, None].view(torch.float64)
    counts, sums = anchors.new_zeros(3 * BINS), anchors.new_zeros(3)
    best = anchors.new_full((2, len(anchors)), -torch.inf)
    beaten = torch.zeros(shards.total if labels is None else 0, dtype=torch.bool, device=anchors.device)
    for block in blocks(torch.cat([candidates, shared], 1), shards, world):
        result, of_candidates = similarities(anchors[block.rows], block.candidates[:, :-1]), block.candidates[:, -1]
        itself = block.is_itself(shards)
        if labels is None:
            kind = torch.where(itself, _POSITIVE, _NEGATIVE)
            columns = slice(block.start, block.start + len(of_candidates))
            beaten[columns] |= ((result >= of_candidates) & ~itself).any(0)
        else:
            of_candidates = of_candidates.contiguous().view(torch.int64)
            kind = torch.where(labels[block.rows, None] == of_candidates, _POSITIVE, _NEGATIVE)
            kind.masked_fill_(itself, _ITSELF)
        bins = ((result + 1) * (BINS / 2)).long().clamp_(0, BINS - 1).add_(kind, alpha=BINS)
        counts += torch.bincount(bins.flatten(), minlength=3 * BINS)
        for of_kind in (_POSITIVE, _NEGATIVE):
            is_kind = kind == of_kind
            sums[of_kind] += result.where(is_kind, 0.0).sum()
            nearest = result.where(is_kind, -torch.inf).amax(1)
            best[of_kind, block.rows] = torch.maximum(best[of_kind, block.rows], nearest)
    has_positive = best[_POSITIVE] > -torch.inf
    return {
        "counts": counts[: 2 * BINS],
        "sums": sums[:2],
        "hits": ((best[_POSITIVE] > best[_NEGATIVE]) & has_positive).sum().double(),
        "without_positive": (~has_positive).sum().double(),
        "beaten": beaten.double(),
    }


def potential_sum(rows: Tensor, shards: Shards, world: World) -> Tensor:
    """Return Σ exp(−2 ‖x − y‖²) over the pairs of a unit row x of this rank with another unit row y of any rank."""
    total = rows.new_zeros(())
    for block in blocks(rows, shards, world):
        result = rows[block.rows] @ block.candidates.T
        total += result.sub_(1).mul_(4).exp_().masked_fill_(block.is_itself(shards), 0.0).sum()
    return total
