"""Signal-to-noise: the contrastive loss on a distance that is relative to the anchor's variance."""

import torch
from torch import Tensor

from contrastive_zoo.engine.anchor_block import AnchorBlock
from contrastive_zoo.engine.pairwise import squared_distances
from contrastive_zoo.engine.row_statistics import Rows
from contrastive_zoo.loss_base.row_loss import CountedTerms, RowLoss
from contrastive_zoo.loss_base.settings import Number
from contrastive_zoo.losses.contrastive import Power, pair_hinges


class SignalToNoise(RowLoss):
    r"""Compute hinges on pairs as :class:`Contrastive`, on the ratio of noise to the anchor's variance.

        D_ij = var(z_j − z_i) / var(z_i)

    with variances over the d features of unit rows. It is not symmetric. The paper's regulariser of the rows' means is
    not included: add ``λ * z.sum(1).abs().mean()``, pytorch-metric-learning's ZeroMeanRegularizer.

    Args:
        pos_margin: ratio up to which positives have no loss.
        neg_margin: ratio from which on negatives have no loss.
        power: the power of the hinges.
        average: over the pairs with a loss (``"nonzero"``, as pytorch-metric-learning) or ``"all"``.
        normalize: normalise embeddings to unit length first.
        reduction: of :class:`RowLoss`; ``"none"`` returns sums over an anchor's pairs.
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: an unknown average, a power below 1, a margin that is not finite; at the call as :class:`RowLoss`.

    Examples:
        >>> z = torch.tensor([[1.0, -1.0], [2.0, -2.0], [-1.0, 1.0]])
        >>> SignalToNoise(normalize=False)(z, torch.tensor([0, 0, 1]))   # pairs 0, 1: 2/2 and 2/8; negatives: 4 and more
        tensor(0.6250)

    Source: Yuan et al. 2019, https://arxiv.org/abs/1904.02616
    """

    pos_margin: Number = 0.0
    neg_margin: Number = 1.0
    power: Power = 1.0
    average: CountedTerms = "nonzero"

    terms = 2

    def similarity(self, anchors: Tensor, candidates: Tensor) -> Tensor:
        a, b = (x - x.mean(1, keepdim=True) for x in (anchors, candidates))
        signal = a.square().sum(1, keepdim=True).clamp(min=torch.finfo(a.dtype).eps)
        return squared_distances(a, b) / signal

    def on_block(self, block: AnchorBlock) -> Rows:
        distance = self.similarity(block.anchors, block.candidates)
        return (yield from pair_hinges(distance, block, self.pos_margin, self.neg_margin, self.power, self.average))
