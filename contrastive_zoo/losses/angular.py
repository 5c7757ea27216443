"""Angular loss: limit the angle at the negative in the triangle of a positive pair and a negative."""

import math

from torch import Tensor
from typing_extensions import Unpack

from contrastive_zoo.engine.masked import log1p_sum_exp
from contrastive_zoo.engine.rowwise import AnchorBlock
from contrastive_zoo.loss_base.checks import number_problem
from contrastive_zoo.loss_base.distances import MetricLoss, sum_over_positives
from contrastive_zoo.loss_base.row_loss import RowSettings


class Angular(MetricLoss):
    r"""Compute a soft maximum, over the negatives of a positive pair, of the excess of their angle over α.

    With unit rows z, over all ordered positive pairs (i, p) whose class has a negative,

        loss = mean_{i, p∈P(i)} log(1 + Σ_{n∈N(i)} exp(4 tan²α (z_i + z_p)·z_n − 2 (1 + tan²α) z_i·z_p))

    One positive per anchor is processed at a time: memory is linear in N, and P positives take P matmuls.

    Args:
        alpha: α in degrees, between 0 and 90; the paper tries 36 … 45.
        row_settings: normalize, reduction, check_finite of :class:`RowLoss`; ``"none"`` returns sums over an
            anchor's pairs.
            pytorch-metric-learning normalises a pair but not its negatives: give it unit rows to compare.

    Raises:
        ValueError: an angle that is not between 0 and 90 degrees; at the call as :class:`RowLoss`.

    Examples:
        >>> import torch
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> Angular(alpha=45)(z, torch.tensor([0, 0, 1]))   # log(1 + exp(0 − 4)); row 2 has no positive
        tensor(0.0181)

    Source: Wang et al. 2017, https://arxiv.org/abs/1708.01682
    """

    ring_refusal = "each of its terms joins an anchor's positive with all negatives, so it needs whole rows"

    def __init__(self, *, alpha: float = 40.0, **row_settings: Unpack[RowSettings]) -> None:
        super().__init__(**row_settings)
        self.alpha = alpha
        self.refuse_bad_settings()

    def settings_problem(self) -> str | None:
        rule = "alpha is an angle in degrees, between 0 and 90"
        return super().settings_problem() or number_problem(rule, above=0, below=90, alpha=self.alpha)

    def lists_positives(self) -> bool:
        return True

    def on_block(self, block: AnchorBlock) -> tuple[Tensor, Tensor]:
        tan2 = math.tan(math.radians(self.alpha)) ** 2
        anchors, candidates = block.anchors, block.candidates

        def pair_losses(p: Tensor) -> Tensor:
            partners = candidates[p[:, 0]]
            angles = 4 * tan2 * (anchors + partners) @ candidates.T
            similarity = 2 * (1 + tan2) * (anchors * partners).sum(1, keepdim=True)
            return log1p_sum_exp(angles - similarity, mask=block.negative)

        counts = block.positive.sum(1).where(block.negative.any(1), 0)
        positive = block.positive & block.negative.any(1, keepdim=True)
        return sum_over_positives(pair_losses, positive, block.most_positives), counts
