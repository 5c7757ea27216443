"""Tuplet margin: all negatives of an anchor against each positive, with an angular margin."""

import math
from typing import Annotated

import torch
from torch import Tensor

from contrastive_zoo.engine.anchor_block import AnchorBlock
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.block_loss import Average, BlockLoss, info_nce_per_positive
from contrastive_zoo.engine.row_statistics import Rows
from contrastive_zoo.loss_base.row_loss import AnchorLoss
from contrastive_zoo.loss_base.settings import Bounds, Reduction, Temperature

_ANGLE = "margin is an angle of 0 to 180 degrees"
Degrees = Annotated[float, Bounds(_ANGLE, "The paper's 0.1 rad is 5.73.", low=0, high=180, constant=True)]


class TupletMargin(AnchorLoss):
    r"""Compute a softmax loss over tuples of a positive and all negatives, on angles.

    With θ_ij the angle between rows i and j of all ranks, P(i) the other rows with i's label, N(i) those with another,

        loss = mean_{i, p∈P(i)} log( 1 + Σ_{n∈N(i)} exp((cos θ_in − cos(θ_ip − β)) / t) )

    Equal to pytorch-metric-learning's TupletMarginLoss with ``scale=1/t``, also where θ_ip = 0, where its gradient
    is infinite and this one zero.

    Called as ``loss(embeddings, labels)``:

    - embeddings: [n, d], n may differ between ranks.
    - labels: [n] integers.

    Args:
        temperature: t > 0, dimensionless, the paper's 1/s; a tensor or a module is learnable.
        margin: β in degrees, 0 to 180.
        average: ``"pairs"``, equal weights of pairs (i, p), or ``"anchors"``.
        reduction: ``"mean"`` over all ranks' pairs or anchors (nats, 0 without any), ``"sum"``, or ``"none"`` for the local
            anchors, [n].
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: a margin out of range, an unknown average, or what any :class:`Loss` refuses.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])   # log(1 + exp(0 − cos 60°))
        >>> TupletMargin(temperature=1.0, margin=60.0)(z, torch.tensor([0, 0, 1]))
        tensor(0.4741)

    Source: Yu and Tao 2019, https://openaccess.thecvf.com/content_ICCV_2019/html/Yu_Deep_Metric_Learning_With_Tuplet_Margin_Loss_ICCV_2019_paper.html
    """

    temperature: Temperature = 1 / 64
    margin: Degrees = 5.73
    average: Average = "pairs"
    reduction: Reduction = "mean"

    supports_ring = True

    def block_loss(self, batch: Batch) -> BlockLoss:
        settings = batch.settings
        return BlockLoss(_block_losses, temperature=settings.temperature, margin=settings.margin, average=self.average)


def _block_losses(block: AnchorBlock, temperature: Tensor, margin: float, average: Average) -> Rows:
    cos, beta = block.anchors @ block.candidates.T, math.radians(margin)
    sine2 = 1 - cos.square()
    sine = sine2.clamp(min=torch.finfo(cos.dtype).tiny).sqrt().where(sine2 > torch.finfo(cos.dtype).eps, 0)
    slack = cos * math.cos(beta) + sine * math.sin(beta)  # cos(θ − β)
    return (yield from info_nce_per_positive(cos / temperature, block, average, positive_logits=slack / temperature))
