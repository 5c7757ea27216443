"""Multi-similarity: weight each pair by its similarity relative to the anchor's other pairs."""

from typing import Annotated

from torch import Tensor

from contrastive_zoo.engine.masked import any_in_row, log1p_exp
from contrastive_zoo.engine.row_statistics import AnyOf, LogSumExp, Maximum, Minimum, Rows
from contrastive_zoo.loss_base.row_loss import RowLoss
from contrastive_zoo.loss_base.settings import Bounds, Number

_Exponent = Annotated[float, Bounds("alpha and beta are positive", above=0)]


class MultiSimilarity(RowLoss):
    r"""Compute soft sums of an anchor's similarities, to positives below a base and to negatives above it.

        loss_i = 1/α · log(1 + Σ_{p∈P(i)} exp(−α (s_ip − λ)))  +  1/β · log(1 + Σ_{n∈N(i)} exp(β (s_in − λ)))

    averaged over all anchors with any pair.

    Args:
        alpha: α > 0, how much the least similar positives dominate.
        beta: β > 0, how much the most similar negatives dominate.
        base: λ, a similarity.
        epsilon: if given, the paper's mining, as pytorch-metric-learning's MultiSimilarityMiner: only negatives with
            s_in > min_p s_ip − ε and positives with s_ip < max_n s_in + ε.
        normalize: normalise embeddings to unit length first.
        reduction: of :class:`RowLoss`.
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: α or β that is not positive, a base or ε that is not finite; at the call as :class:`RowLoss`.

    Examples:
        >>> import torch
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> MultiSimilarity(base=1.0)(z, torch.tensor([0, 0]))   # log(1 + 1) / 2
        tensor(0.3466)

    Source: Wang et al. 2019, https://arxiv.org/abs/1904.06627
    """

    alpha: _Exponent = 2.0
    beta: _Exponent = 50.0
    base: Number = 0.5
    epsilon: Number | None = None

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> Rows:
        any_pair = AnyOf(any_in_row(positive) | any_in_row(negative))
        if self.epsilon is not None:
            fixed = similarity.detach()
            lowest, highest = yield Minimum(fixed, positive), Maximum(fixed, negative)
            positive = positive & (fixed < highest[:, None] + self.epsilon)
            negative = negative & (fixed > lowest[:, None] - self.epsilon)
        positive_term = LogSumExp(-self.alpha * (similarity - self.base), positive)
        negative_term = LogSumExp(self.beta * (similarity - self.base), negative)
        of_positives, of_negatives, valid = yield positive_term, negative_term, any_pair
        return log1p_exp(of_positives) / self.alpha + log1p_exp(of_negatives) / self.beta, valid
