"""Generalised lifted structure: a soft maximum of positive distances below a soft minimum of negative distances."""

from torch import Tensor

from contrastive_zoo.engine.row_statistics import AnyOf, LogSumExp, Rows
from contrastive_zoo.loss_base.row_loss import DissimilarityLoss
from contrastive_zoo.loss_base.settings import Number


class GeneralizedLiftedStructure(DissimilarityLoss):
    r"""Compute a hinge on two soft extremes: the farthest positive and the nearest negative.

    With D_ij the distance of unit rows,

        loss_i = max(0, log Σ_{p∈P(i)} exp(D_ip − pos_margin) + log Σ_{n∈N(i)} exp(neg_margin − D_in))

    averaged over the anchors with a positive and a negative. pytorch-metric-learning counts other anchors, too,
    with 0 for an empty sum. Where every class has two rows or more, both values are equal.

    Args:
        pos_margin: in units of the metric.
        neg_margin: in units of the metric; the paper's margin is neg_margin − pos_margin.
        metric: ``"distance"``, ``"squared distance"`` or ``"similarity"``; for the last set both margins.
        normalize: normalise embeddings to unit length first.
        reduction: of :class:`RowLoss`.
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: an unknown metric, a margin that is not finite; at the call as :class:`RowLoss`.

    Examples:
        >>> import torch
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
        >>> GeneralizedLiftedStructure(neg_margin=3.0)(z, torch.tensor([0, 0, 1]))   # 0 + (3 − 2); row 2 has no positive
        tensor(1.)

    Source: Hermans et al. 2017, eq. 8, https://arxiv.org/abs/1703.07737
    """

    pos_margin: Number = 0.0
    neg_margin: Number = 1.0

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> Rows:
        farthest, nearest, has_positive, has_negative = yield (
            LogSumExp(similarity - self.sign * self.pos_margin, positive, empty=0.0),
            LogSumExp(self.sign * self.neg_margin - similarity, negative, empty=0.0),
            AnyOf(positive.any(1)),
            AnyOf(negative.any(1)),
        )
        return (farthest + nearest).relu(), has_positive & has_negative
