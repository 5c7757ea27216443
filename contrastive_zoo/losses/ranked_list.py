"""Ranked list: positives within one radius, negatives beyond a larger one, with the hardest weighted most."""

from typing import Annotated

import torch
from torch import Tensor

from contrastive_zoo.engine.pairwise import distances, row_sums
from contrastive_zoo.engine.row_statistics import AnyOf, Maximum, Rows, Sum
from contrastive_zoo.loss_base.row_loss import RowLoss
from contrastive_zoo.loss_base.settings import Bounds, Number

_NonNegative = Annotated[float, Bounds("t_p, t_n and epsilon are 0 or more", low=0)]


class RankedList(RowLoss):
    r"""Compute weighted means of the hinges of positives and of negatives that violate their radius.

    With D_ij the distance of unit rows, over the pairs with D_ip > α − margin and D_in < α,

        loss_i = (1 − λ) Σ_p w_p (D_ip − α + margin) / Σ_p w_p  +  λ Σ_n w_n (α − D_in) / Σ_n w_n
        w_p = exp(T_p (D_ip − α + margin)),  w_n = exp(T_n (α − D_in))

    averaged over the anchors with any pair; an empty mean is 0. The weights have gradients, too.

    Args:
        margin: difference of the two radii.
        alpha: α, the radius beyond which negatives have no loss.
        t_p: T_p >= 0; 0 weights positives equally.
        t_n: T_n >= 0.
        imbalance: λ in 0 … 1, the share of the negatives.
        epsilon: added to Σ w once per row of the batch. 0 is the paper's; pytorch-metric-learning's is 1e-5.
        normalize: normalise embeddings to unit length first.
        reduction: of :class:`RowLoss`.
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: a λ outside of 0 … 1, a negative T or epsilon, a margin or α that is not finite; at the call
            as :class:`RowLoss`.

    Examples:
        >>> import torch
        >>> z = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.8, 0.6]])
        >>> RankedList(t_n=0)(z, torch.tensor([0, 0, 1]))   # ½ of √2 − 0.8 twice, 1.2 − √0.4, 1.2 − √0.8, their mean; thirds
        tensor(0.4230)

    Source: Wang et al. 2019, https://arxiv.org/abs/1903.03238
    """

    margin: Number = 0.4
    alpha: Number = 1.2
    t_p: _NonNegative = 0.0
    t_n: _NonNegative = 10.0
    imbalance: Annotated[float, Bounds("imbalance is a share, 0 … 1", low=0, high=1)] = 0.5
    epsilon: _NonNegative = 0.0

    def similarity(self, anchors: Tensor, candidates: Tensor) -> Tensor:
        return distances(anchors, candidates)

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> Rows:
        valid = AnyOf(positive.any(1) | negative.any(1))
        of_positives, of_negatives = similarity - self.alpha + self.margin, self.alpha - similarity
        violations = [(of_positives, positive & (of_positives > 0)), (of_negatives, negative & (of_negatives > 0))]
        largest = yield [Maximum(hinge.detach(), where) for hinge, where in violations]
        shifts = [t * x.clamp(min=0) for t, x in zip((self.t_p, self.t_n), largest, strict=True)]
        weights = [
            (t * hinge - shift[:, None]).exp().where(where, 0)
            for t, shift, (hinge, where) in zip((self.t_p, self.t_n), shifts, violations, strict=True)
        ]
        sums = [(w * hinge).sum(1) for w, (hinge, _) in zip(weights, violations, strict=True)]
        *sums, totals, count, has_pair = yield (
            *(Sum(x) for x in sums),
            Sum(row_sums(*weights)),
            Sum(similarity.new_full((len(similarity),), similarity.shape[1])),
            valid,
        )
        totals = totals + self.epsilon * count[:, None] * (-torch.stack(shifts, 1)).exp()
        positive_mean, negative_mean = (torch.stack(sums, 1) / totals.where(totals > 0, 1)).unbind(1)
        return (1 - self.imbalance) * positive_mean + self.imbalance * negative_mean, has_pair
