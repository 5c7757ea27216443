"""Threshold-consistent margin: penalise the positives and negatives on the wrong side of two fixed similarities."""

from torch import Tensor
from typing_extensions import Unpack

from contrastive_zoo.loss_base.checks import number_problem
from contrastive_zoo.loss_base.distances import MetricLoss, row_sums
from contrastive_zoo.loss_base.row_loss import RowSettings


class ThresholdConsistentMargin(MetricLoss):
    r"""Compute the mean violations of a least positive and a largest negative similarity; a regulariser of other losses.

        loss = λ⁺ mean_{s_ip ≤ m⁺} (m⁺ − s_ip)  +  λ⁻ mean_{s_in ≥ m⁻} (s_in − m⁻)

    over the ordered pairs of the rows of all ranks; an empty mean is 0. Equal to pytorch-metric-learning's
    ThresholdConsistentMarginLoss.

    Args:
        positive_margin: m⁺.
        negative_margin: m⁻.
        positive_weight: λ⁺.
        negative_weight: λ⁻.
        row_settings: normalize, reduction, check_finite of :class:`RowLoss`; ``"none"`` returns sums over an
            anchor's pairs.

    Raises:
        ValueError: a margin or weight that is not finite; at the call as :class:`RowLoss`.

    Examples:
        >>> import torch
        >>> z = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
        >>> ThresholdConsistentMargin()(z, torch.tensor([0, 0, 1]))   # 0.9 − 0.6 and 0.8 − 0.5
        tensor(0.6000)

    Source: Zhang et al. 2024, https://arxiv.org/abs/2307.04047
    """

    terms = 2

    def __init__(
        self,
        *,
        positive_margin: float = 0.9,
        negative_margin: float = 0.5,
        positive_weight: float = 1.0,
        negative_weight: float = 1.0,
        **row_settings: Unpack[RowSettings],
    ) -> None:
        super().__init__(**row_settings)
        self.positive_margin, self.negative_margin = positive_margin, negative_margin
        self.positive_weight, self.negative_weight = positive_weight, negative_weight
        self.refuse_bad_settings()

    def settings_problem(self) -> str | None:
        weights = {"positive_weight": self.positive_weight, "negative_weight": self.negative_weight}
        margins = {"positive_margin": self.positive_margin, "negative_margin": self.negative_margin}
        return super().settings_problem() or number_problem(**margins, **weights)

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        low = positive & (similarity <= self.positive_margin)
        high = negative & (similarity >= self.negative_margin)
        positive_term = self.positive_weight * (self.positive_margin - similarity).where(low, 0)
        negative_term = self.negative_weight * (similarity - self.negative_margin).where(high, 0)
        return row_sums(positive_term, negative_term), row_sums(low, high)
