"""Angular loss: limit the angle at the negative in the triangle of a positive pair and a negative."""

import math
from typing import Annotated

from torch import Tensor

from contrastive_zoo.engine.anchor_block import AnchorBlock
from contrastive_zoo.engine.hinges import sum_over_positives
from contrastive_zoo.engine.masked import log1p_sum_exp
from contrastive_zoo.loss_base.row_loss import RowLoss
from contrastive_zoo.loss_base.settings import Bounds


class Angular(RowLoss):
    r"""Compute a soft maximum, over the negatives of a positive pair, of the excess of their angle over α.

    With unit rows z, over all ordered positive pairs (i, p) whose class has a negative,

        loss = mean_{i, p∈P(i)} log(1 + Σ_{n∈N(i)} exp(4 tan²α (z_i + z_p)·z_n − 2 (1 + tan²α) z_i·z_p))

    One positive per anchor is processed at a time: memory is linear in N, and P positives take P matmuls.

    Args:
        alpha: α in degrees, between 0 and 90; the paper tries 36 … 45.
        normalize: normalise embeddings to unit length first. pytorch-metric-learning normalises a pair but not its
            negatives: give it unit rows to compare.
        reduction: of :class:`RowLoss`; ``"none"`` returns sums over an anchor's pairs.
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: an angle that is not between 0 and 90 degrees; at the call as :class:`RowLoss`.

    Examples:
        >>> import torch
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> Angular(alpha=45)(z, torch.tensor([0, 0, 1]))   # log(1 + exp(0 − 4)); row 2 has no positive
        tensor(0.0181)

    Source: Wang et al. 2017, https://arxiv.org/abs/1708.01682
    """

    alpha: Annotated[
        float, Bounds("alpha is an angle in degrees, between 0 and 90", above=0, below=90, constant=True)
    ] = 40.0

    ring_refusal = "each of its terms joins an anchor's positive with all negatives, so it needs whole rows"

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
