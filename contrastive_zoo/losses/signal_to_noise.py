"""Signal-to-noise: the contrastive loss on a distance that is relative to the anchor's variance."""

import torch
from torch import Tensor
from typing_extensions import Unpack

from contrastive_zoo.loss_base.distances import CountedTerms, squared_distances
from contrastive_zoo.loss_base.row_loss import RowSettings
from contrastive_zoo.losses.contrastive import Contrastive


class SignalToNoise(Contrastive):
    r"""Compute hinges on pairs as :class:`Contrastive`, on the ratio of noise to the anchor's variance.

        D_ij = var(z_j − z_i) / var(z_i)

    with variances over the d features of unit rows. It is not symmetric. The paper's regulariser of the rows' means is
    not included: add ``λ * z.sum(1).abs().mean()``, pytorch-metric-learning's ZeroMeanRegularizer.

    Args:
        pos_margin: ratio up to which positives have no loss.
        neg_margin: ratio from which on negatives have no loss.
        power: the power of the hinges.
        average: over the pairs with a loss (``"nonzero"``, as pytorch-metric-learning) or ``"all"``.
        row_settings: normalize, reduction, check_finite of :class:`RowLoss`; ``"none"`` returns sums over an
            anchor's pairs.

    Raises:
        ValueError: an unknown average, a power below 1, a margin that is not finite; at the call as :class:`RowLoss`.

    Examples:
        >>> z = torch.tensor([[1.0, -1.0], [2.0, -2.0], [-1.0, 1.0]])
        >>> SignalToNoise(normalize=False)(z, torch.tensor([0, 0, 1]))   # pairs 0, 1: 2/2 and 2/8; negatives: 4 and more
        tensor(0.6250)

    Source: Yuan et al. 2019, https://arxiv.org/abs/1904.02616
    """

    def __init__(
        self,
        *,
        pos_margin: float = 0.0,
        neg_margin: float = 1.0,
        power: float = 1.0,
        average: CountedTerms = "nonzero",
        **row_settings: Unpack[RowSettings],
    ) -> None:
        super().__init__(pos_margin=pos_margin, neg_margin=neg_margin, power=power, average=average, **row_settings)

    def similarity(self, anchors: Tensor, columns: Tensor) -> Tensor:
        a, b = (x - x.mean(1, keepdim=True) for x in (anchors, columns))
        signal = a.square().sum(1, keepdim=True).clamp(min=torch.finfo(a.dtype).eps)
        return squared_distances(a, b) / signal
