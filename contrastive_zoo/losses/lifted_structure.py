"""Lifted structure: each positive pair against all negatives of both of its rows."""

import torch
from torch import Tensor

from contrastive_zoo.engine.anchor_block import AnchorBlock
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.block_loss import BlockLoss
from contrastive_zoo.engine.pairwise import distances
from contrastive_zoo.engine.row_statistics import AnyOf, LogSumExp, Rows, Sum
from contrastive_zoo.engine.rowwise import reduce_rows
from contrastive_zoo.loss_base.families import LabelledLoss
from contrastive_zoo.loss_base.settings import Number, Reduction


class LiftedStructure(LabelledLoss):
    r"""Compute a squared hinge on positive pairs, with a soft minimum of both rows' distances to negatives as margin.

    With D_ij the distance of unit rows, over all ordered positive pairs (i, p) of the rows of all ranks,

        loss = mean_{i, p∈P(i)} ½ max(0, D_ip − pos_margin + log Σ_{k∈{i,p}} Σ_{n∈N(k)} exp(neg_margin − D_kn))²

    Two sweeps: the first computes a log-sum-exp over negatives for each row, which the second gathers with the row.

    Called as ``loss(embeddings, labels)``:

    - embeddings: [n, d], n may differ between ranks.
    - labels: [n] integers.

    Args:
        pos_margin: distance.
        neg_margin: distance; the paper's margin, with pos_margin 0.
        normalize: normalise embeddings to unit length first; the paper does not.
        reduction: ``"mean"`` over positive pairs (0 without any), ``"sum"``, or ``"none"`` for the local rows' sums, [n].
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: a margin that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
        >>> LiftedStructure(neg_margin=3.0)(z, torch.tensor([0, 0, 1]))   # (log(e + e))² / 2
        tensor(1.4334)

    Source: Song et al. 2016, eq. 4, https://arxiv.org/abs/1511.06452
    """

    pos_margin: Number = 0.0
    neg_margin: Number = 1.0
    normalize: bool = True
    reduction: Reduction = "mean"

    supports_ring = True

    def compute(self, batch: Batch) -> Tensor:
        z = batch.prepared(batch.rows["embeddings"], normalize=self.normalize)
        ids, settings = batch.int64(batch.rows["labels"]), batch.settings
        crowding = reduce_rows(batch, BlockLoss(_negative_sums, margin=settings.neg_margin), z, ids, reduction="none")
        z, loss = torch.cat([z, crowding[:, None]], 1), BlockLoss(_pairs, margin=settings.pos_margin)
        return reduce_rows(batch, loss, z, ids, reduction=self.reduction)


def _negative_sums(block: AnchorBlock, margin: float) -> Rows:
    logits = margin - distances(block.anchors, block.candidates)
    crowding, valid = yield LogSumExp(logits, block.negative, empty=0.0), AnyOf(block.negative.any(1))
    return crowding, valid


def _pairs(block: AnchorBlock, margin: float) -> Rows:
    distance = distances(block.anchors[:, :-1], block.candidates[:, :-1])
    crowding = torch.logaddexp(block.anchors[:, -1:], block.candidates[:, -1])
    hinges = (distance - margin + crowding).relu().square().where(block.positive, 0)
    losses, pairs, has_negative = yield (
        Sum(hinges.sum(1)),
        Sum(block.positive.sum(1)),
        AnyOf(block.negative.any(1)),
    )
    return losses / 2, pairs.where(has_negative, 0)
