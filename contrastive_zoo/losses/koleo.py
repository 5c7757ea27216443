"""KoLeo: embeddings spread out, measured by the distance of each from its nearest neighbour."""

import torch
from torch import Tensor

from contrastive_zoo.engine.anchor_block import AnchorBlock
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.block_loss import BlockLoss
from contrastive_zoo.engine.pairwise import squared_distances
from contrastive_zoo.engine.rowwise import reduce_rows
from contrastive_zoo.loss_base.families import EmbeddingLoss
from contrastive_zoo.loss_base.settings import Positive, Reduction

_ROUNDING_UNITS = 8
"""Rows that differ by fewer units of rounding count as equal."""


class KoLeo(EmbeddingLoss):
    r"""Compute minus the log of the distance to the nearest neighbour, Kozachenko & Leonenko's estimate of the entropy.

    With z the unit rows of all ranks,

        loss_i = −log(min_{j≠i} ‖z_i − z_j‖ + ε)

    A single row has no neighbour and no loss; of neighbours at equal distances the first gets the gradient; equal rows have
    none. It regularises another loss: DINOv2 adds 0.1 times it, on the class tokens of each large crop by itself. DINOv2
    and lightly look for the neighbour on the own process only, and add ε to each coordinate, too.

    Called as ``loss(embeddings)``:

    - embeddings: [n, d], n may differ between ranks.

    Args:
        eps: ε > 0.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' rows, ``"sum"``, or ``"none"`` for the local rows, [n].
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: an eps that is not positive, or what any :class:`Loss` refuses.

    Examples:
        >>> KoLeo()(torch.eye(3))   # −log √2
        tensor(-0.3466)

    Source: Sablayrolles et al. 2019, https://arxiv.org/abs/1806.03198
    """

    eps: Positive = 1e-8
    normalize: bool = True
    reduction: Reduction = "mean"

    def compute(self, batch: Batch) -> Tensor:
        z, loss = batch.prepared(batch.first, normalize=self.normalize), BlockLoss(_nearest, eps=batch.settings.eps)
        return reduce_rows(batch, loss, z, batch.indices(), reduction=self.reduction)


def _nearest(block: AnchorBlock, eps: float) -> tuple[Tensor, Tensor]:
    """Find the neighbour by a matmul; measure its distance by the difference, which keeps the digits of near ones."""
    anchors, candidates = block.anchors, block.candidates
    some = block.negative.any(1)
    if not candidates.shape[0]:
        return anchors.sum(1), some
    squared_distance = squared_distances(anchors.detach(), candidates.detach())
    neighbour = candidates[squared_distance.masked_fill(~block.negative, torch.inf).argmin(1)]
    squared = (anchors - neighbour).square().sum(1)
    rounding = _ROUNDING_UNITS * torch.finfo(squared.dtype).eps
    distinct = some & (squared > rounding**2 * (anchors.detach().square() + neighbour.detach().square()).sum(1))
    distance = squared.where(distinct, 1).sqrt().where(distinct, 0)
    return -(distance.where(some, 1) + eps).log(), some
