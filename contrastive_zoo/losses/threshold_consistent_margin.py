"""Threshold-consistent margin: penalise the positives and negatives on the wrong side of two fixed similarities."""

from torch import Tensor

from contrastive_zoo.engine.pairwise import row_sums
from contrastive_zoo.loss_base.row_loss import RowLoss
from contrastive_zoo.loss_base.settings import Number


class ThresholdConsistentMargin(RowLoss):
    r"""Compute the mean violations of a least positive and a largest negative similarity; a regulariser of other losses.

        loss = λ⁺ mean_{s_ip ≤ m⁺} (m⁺ − s_ip)  +  λ⁻ mean_{s_in ≥ m⁻} (s_in − m⁻)

    over the ordered pairs of the rows of all ranks; an empty mean is 0. Equal to pytorch-metric-learning's
    ThresholdConsistentMarginLoss.

    Args:
        positive_margin: m⁺.
        negative_margin: m⁻.
        positive_weight: λ⁺.
        negative_weight: λ⁻.
        normalize: normalise embeddings to unit length first.
        reduction: of :class:`RowLoss`; ``"none"`` returns sums over an anchor's pairs.
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: a margin or weight that is not finite; at the call as :class:`RowLoss`.

    Examples:
        >>> import torch
        >>> z = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
        >>> ThresholdConsistentMargin()(z, torch.tensor([0, 0, 1]))   # 0.9 − 0.6 and 0.8 − 0.5
        tensor(0.6000)

    Source: Zhang et al. 2024, https://arxiv.org/abs/2307.04047
    """

    positive_margin: Number = 0.9
    negative_margin: Number = 0.5
    positive_weight: Number = 1.0
    negative_weight: Number = 1.0

    terms = 2

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        low = positive & (similarity <= self.positive_margin)
        high = negative & (similarity >= self.negative_margin)
        positive_term = self.positive_weight * (self.positive_margin - similarity).where(low, 0)
        negative_term = self.negative_weight * (similarity - self.negative_margin).where(high, 0)
        return row_sums(positive_term, negative_term), row_sums(low, high)
