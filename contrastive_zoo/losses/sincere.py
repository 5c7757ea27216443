"""SINCERE: each positive is compared with the negatives only, never with the anchor's other positives."""

from torch import Tensor

from contrastive_zoo.engine.anchor_block import AnchorBlock
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.block_loss import Average, BlockLoss, info_nce_per_positive
from contrastive_zoo.engine.row_statistics import Rows
from contrastive_zoo.loss_base.row_loss import AnchorLoss
from contrastive_zoo.loss_base.settings import Reduction, Temperature


class SINCERE(AnchorLoss):
    r"""Compute supervised InfoNCE revisited: the mean of the InfoNCE losses of an anchor's positives.

    With z the unit rows of all ranks, P(i) the other rows with i's label and N(i) those with another,

        loss_i = mean_{p∈P(i)} log( 1 + Σ_{n∈N(i)} exp((z_i·z_n − z_i·z_p) / t) )

    Called as ``loss(embeddings, labels)``:

    - embeddings: [n, d], n may differ between ranks.
    - labels: [n] integers.

    Args:
        temperature: t > 0, dimensionless; a tensor or a module is learnable.
        average: ``"anchors"``, equal weights of anchors with a positive, as in the authors' code; or ``"pairs"`` (i, p),
            which is pytorch-metric-learning's NTXentLoss on labelled rows, with memory linear in N.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' anchors or pairs (nats, 0 without any), ``"sum"``, or ``"none"`` for the local
            anchors, [n].
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: an unknown average, or what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> SINCERE(temperature=1.0)(torch.eye(2)[[0, 0, 1]], torch.tensor([0, 0, 1]))   # log(1 + e⁻¹); row 2 has none
        tensor(0.3133)

    Source: Feeney and Hughes 2023, https://arxiv.org/abs/2309.14277
    """

    temperature: Temperature = 0.1
    average: Average = "anchors"
    normalize: bool = True
    reduction: Reduction = "mean"

    supports_ring = True

    def block_loss(self, batch: Batch) -> BlockLoss:
        return BlockLoss(_block_losses, temperature=batch.settings.temperature, average=self.average)


def _block_losses(block: AnchorBlock, temperature: Tensor, average: Average) -> Rows:
    return (yield from info_nce_per_positive(block.anchors @ block.candidates.T / temperature, block, average))
