"""Circle loss: each similarity is weighted by its distance from its optimum."""

from typing import Annotated

from torch import Tensor

from contrastive_zoo.engine.masked import any_in_row, log1p_exp
from contrastive_zoo.engine.row_statistics import AnyOf, LogSumExp, Rows
from contrastive_zoo.loss_base.row_loss import CountedTerms, RowLoss
from contrastive_zoo.loss_base.settings import Bounds, Number


class Circle(RowLoss):
    r"""Compute a log-sum-exp over all pairs of a positive and a negative, with self-paced weights.

        loss_i = log(1 + Σ_{n∈N(i)} exp(γ a_n (s_in − m)) · Σ_{p∈P(i)} exp(−γ a_p (s_ip − 1 + m)))
        a_p = max(0, 1 + m − s_ip),  a_n = max(0, s_in + m),  both without gradient

    averaged over the anchors with a positive and a negative.

    Args:
        m: relaxation, the radius of the decision boundary.
        gamma: γ > 0, scale; the paper's pairs (m, γ) are 0.25, 256 for faces, 0.25, 128 for persons, 0.4, 80 for images.
        average: ``"nonzero"`` leaves out anchors whose loss has underflowed to 0, as pytorch-metric-learning does.
        normalize: normalise embeddings to unit length first.
        reduction: of :class:`RowLoss`.
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: a γ that is not positive, an m that is not finite, an unknown average; at the call as :class:`RowLoss`.

    Examples:
        >>> import torch
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> Circle(m=0.5, gamma=1.0)(z, torch.tensor([0, 0, 1]))   # log(1 + exp(−½·½) · exp(−½·½)); row 2 has no positive
        tensor(0.4741)

    Source: Sun et al. 2020, eq. 6, https://arxiv.org/abs/2002.10857
    """

    m: Number = 0.4
    gamma: Annotated[float, Bounds("gamma is positive", above=0)] = 80.0
    average: CountedTerms = "all"

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> Rows:
        s, constant = similarity, similarity.detach()
        positive_term = (constant - 1 - self.m).clamp_(max=0).mul_(self.gamma) * (s - 1 + self.m)
        negative_term = (constant + self.m).clamp_(min=0).mul_(self.gamma) * (s - self.m)
        of_positives, of_negatives, has_positive, has_negative = yield (
            LogSumExp(positive_term, positive, empty=0.0),
            LogSumExp(negative_term, negative, empty=0.0),
            AnyOf(any_in_row(positive)),
            AnyOf(any_in_row(negative)),
        )
        losses, valid = log1p_exp(of_positives + of_negatives), has_positive & has_negative
        return losses, valid & (losses > 0) if self.average == "nonzero" else valid
