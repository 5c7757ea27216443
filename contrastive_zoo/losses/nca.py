"""NCA: the probability that a neighbour, drawn by distance, is of the same class."""

from torch import Tensor

from contrastive_zoo.engine.anchor_block import AnchorBlock
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.block_loss import BlockLoss
from contrastive_zoo.engine.row_statistics import AnyOf, LogSumExp, Rows
from contrastive_zoo.engine.softmax_arithmetic import cross_entropy
from contrastive_zoo.loss_base.row_loss import AnchorLoss
from contrastive_zoo.loss_base.settings import Reduction, Temperature


class NCA(AnchorLoss):
    r"""Compute −log of the probability that a stochastic neighbour is of the anchor's class.

    With z the rows of all ranks, P(i) the other rows with i's label,

        loss_i = log Σ_{k≠i} exp(−‖z_i − z_k‖² / t)  −  log Σ_{p∈P(i)} exp(−‖z_i − z_p‖² / t)

    averaged over the anchors that have a positive, the paper's alternative to the sum of the probabilities. Equal to
    pytorch-metric-learning's NCALoss with ``softmax_scale=1/t``, which leaves out anchors whose probability underflows.

    Called as ``loss(embeddings, labels)``:

    - embeddings: [n, d], n may differ between ranks.
    - labels: [n] integers.

    Args:
        temperature: t > 0, in units of squared distance; a tensor or a module is learnable.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over anchors with a positive (nats, 0 without any), ``"sum"``, or ``"none"`` for the local
            anchors, [n].
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> NCA()(torch.eye(2)[[0, 0, 1]], torch.tensor([0, 0, 1]))   # log(1 + e⁻²); row 2 has no positive
        tensor(0.1269)

    Source: Goldberger et al. 2004, https://www.cs.toronto.edu/~hinton/absps/nca.pdf
    """

    temperature: Temperature = 1.0
    normalize: bool = True
    reduction: Reduction = "mean"

    supports_ring = True

    def block_loss(self, batch: Batch) -> BlockLoss:
        return BlockLoss(_neighbours, temperature=batch.settings.temperature)


def _neighbours(block: AnchorBlock, temperature: Tensor) -> Rows:
    logits = (2 * block.anchors @ block.candidates.T - block.candidates.square().sum(1)) / temperature  # ‖z_i‖² cancels
    of_positives, of_negatives, valid = yield (
        LogSumExp(logits, block.positive, empty=0.0),
        LogSumExp(logits, block.negative),
        AnyOf(block.positive.any(1)),
    )
    return cross_entropy(of_positives, of_negatives), valid
