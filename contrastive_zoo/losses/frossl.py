"""FroSSL: equal views, and features of high entropy by the Frobenius norm of their second moments."""

import torch
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.statistics import divided_by_norms, second_moments
from contrastive_zoo.loss_base.families import ViewLoss
from contrastive_zoo.loss_base.settings import Number


class FroSSL(ViewLoss):
    r"""Compute the log of the squared Frobenius norm of each view's second moments plus the distance of views.

    With ẑ_v the V views, each feature divided by its norm over the rows of all ranks, d features and m = mean_v ẑ_v,

        loss = Σ_v [ log ‖ẑ_vᵀ ẑ_v / tr(ẑ_vᵀ ẑ_v)‖_F²  +  λ V/N Σ_i ‖ẑ_vi − m_i‖² ]

    The traces, which are d unless a feature is 0 everywhere, have no gradient. Equal to lightly's FroSSLLoss. The
    first term is at least −log d. Only d × d matrices exist, also for N < d. A view of zeros has no first term.

    Called as ``loss(view1, view2, …)``: two or more views of the same samples, [n, d] each; n may differ between ranks.

    Args:
        invariance: λ.
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: a weight that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> FroSSL()(torch.eye(2), torch.eye(2))   # 2 log(½² + ½²)
        tensor(-1.3863)

    Source: Skean et al. 2024, https://arxiv.org/abs/2310.02903
    """

    invariance: Number = 1.0

    def compute(self, batch: Batch) -> Tensor:
        rows = [batch.prepared(x, normalize=False) for x in batch.rows.values()]
        scaled = [divided_by_norms(batch, z) for z in rows]
        center, terms = sum(scaled[1:], scaled[0]) / len(scaled), []
        for z in scaled:
            moments = second_moments(batch, z, z)
            squares = (moments / moments.detach().trace().clamp(min=1)).square().sum()
            distance = batch.reduce((z - center).square().sum(1))
            terms.append(squares.where(squares > 0, 1).log() + batch.settings.invariance * len(scaled) * distance)
        return torch.stack(terms).sum()
