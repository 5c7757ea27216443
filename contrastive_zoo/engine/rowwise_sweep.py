"""Sweep over the local anchors block by block: their losses, or the gradients of their weighted sum."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from contrastive_zoo.collectives import reduce_scatter_rows, sum_over_ranks
from contrastive_zoo.engine import tiling
from contrastive_zoo.engine.anchor_block import BatchLayout, BlockFunction
from contrastive_zoo.engine.derivatives import inner_graph
from contrastive_zoo.engine.malloc import keep_freed_memory
from contrastive_zoo.engine.pairwise import share_across_blocks
from contrastive_zoo.engine.precision import without_autocast
from contrastive_zoo.engine.row_statistics import complete
from contrastive_zoo.engine.similarity_budget import budget

MATRICES_PER_BLOCK, FEWEST_MATRICES = 16, 4
"""Matrices as large as the block's similarities that a loss makes: Circle, which makes most, and a simple loss."""

LOW_BLOCK = 64
"""Height of a block below which its fixed cost, a pass over the gradients of all candidates, is noticeable."""


def anchor_slices(anchors: Tensor, candidates: int) -> Iterator[slice]:
    """Yield slices of anchors whose similarities to so many candidates fit into the budget, with all that a loss makes.

    Examples:
        >>> list(anchor_slices(torch.ones(3, 2), 5))
        [slice(0, 3, None)]
    """
    row_bytes = max(1, candidates) * anchors.dtype.itemsize
    available = max(tiling.TILE_BYTES, budget())
    if anchors.device.type == "cpu":  # beyond a CPU's cache every pass takes longer
        available = min(available, tiling.BLOCK_BYTES)
    # a low block may exceed its share
    height = max(
        1, available // (MATRICES_PER_BLOCK * row_bytes), min(LOW_BLOCK, available // (FEWEST_MATRICES * row_bytes))
    )
    return (slice(top, min(top + height, len(anchors))) for top in range(0, len(anchors), height))


class RowwiseSweep:
    """Call a block function on all local anchors, block by block.

    Args:
        on_block: the function.
        terms: the number of means that it adds.
        layout: the ids of anchors and candidates.
        anchors: the local anchors.
        candidates: the candidates of all ranks.
        parameters: the parameters of the function.
    """

    def __init__(
        self,
        on_block: BlockFunction,
        terms: int,
        layout: BatchLayout,
        anchors: Tensor,
        candidates: Tensor,
        parameters: Sequence[Tensor],
    ) -> None:
        self.on_block, self.terms, self.layout, self.parameters = on_block, terms, layout, parameters
        self.anchors, self.candidates = anchors.detach(), candidates.detach()

    def _block_losses(self, rows: slice, anchors: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
        """Return losses and counts of a block's anchors, [c, terms]; losses that do not count are zero."""
        block = self.layout.block(rows, anchors, candidates)
        losses, counts = (x.reshape(-1, self.terms) for x in complete(self.on_block(block)))
        return losses.where(counts > 0, 0), counts

    def losses(self) -> tuple[Tensor, Tensor]:
        """Return losses and counts of the local anchors."""
        losses, counts = self.anchors.new_zeros(2, len(self.anchors), self.terms)
        with torch.no_grad():
            for rows in anchor_slices(self.anchors, len(self.candidates)):
                losses[rows], counts[rows] = self._block_losses(rows, self.anchors[rows], self.candidates)
        return losses, counts

    @without_autocast
    def gradients(self, weights: Tensor | None = None) -> list[Tensor]:
        """Return losses, counts, and the gradients of the weighted sum by local anchors, local candidates, parameters.

        The gradients by candidates and parameters are complete: other ranks' anchors are included.
        """
        losses, counts, danchors, dcandidates, *dparameters = self.local_gradients(weights)
        dcandidates = reduce_scatter_rows(dcandidates, self.layout.candidate_shards, self.layout.world)
        dparameters = [sum_over_ranks(x, gradient="partial", world=self.layout.world) for x in dparameters]
        return [losses, counts, danchors, dcandidates, *dparameters]

    def local_gradients(self, weights: Tensor | None) -> list[Tensor]:
        """Return losses, counts, and the gradients of the local anchors' weighted sum by anchors, by the candidates of all
        ranks, and by parameters.
        """
        keep_freed_memory(self.anchors)
        danchors, dcandidates = torch.zeros_like(self.anchors), torch.zeros_like(self.candidates)
        dparameters = [torch.zeros_like(parameter) for parameter in self.parameters]
        # allocated once, so that no small tensor stays allocated between blocks
        losses, counts = self.anchors.new_zeros(2, len(self.anchors), self.terms)
        candidates = share_across_blocks(self.candidates)
        for rows in anchor_slices(self.anchors, len(self.candidates)):
            with inner_graph():
                anchors = self.anchors[rows].requires_grad_()
                block_losses, counts[rows] = self._block_losses(rows, anchors, candidates)
            losses[rows] = block_losses.detach()
            if not block_losses.requires_grad:
                continue
            weight = torch.ones_like(block_losses) if weights is None else weights[rows].to(block_losses.dtype)
            danchors[rows], by_candidates, *by_parameters = torch.autograd.grad(
                block_losses, (anchors, candidates, *self.parameters), weight, allow_unused=True, materialize_grads=True
            )
            if by_candidates.is_sparse:
                dcandidates.index_add_(0, by_candidates._indices()[0], by_candidates._values())
            else:
                dcandidates += by_candidates
            for total, part in zip(dparameters, by_parameters, strict=True):
                total += part
        return [losses, counts, danchors, dcandidates, *dparameters]
