"""VIbCReg: VICReg with correlations of features, normalised over the batch, in place of covariances."""

from typing import Annotated

import torch  # noqa: F401 - the examples use it
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.statistics import LEAST_SQUARE, centered, off_diagonal, second_moments, squared_sums
from contrastive_zoo.loss_base.families import TwoViewLoss
from contrastive_zoo.loss_base.settings import Bounds, Number


class VIbCReg(TwoViewLoss):
    r"""Compute the variance-invariance-better-covariance regularisation; embeddings are not normalised.

    With Cov the covariance (over N − 1) and R the correlation matrix of the features over the rows of all ranks,

        loss = λ mean_{i,k} (a_ik − b_ik)²  +  Σ_{z∈{a,b}} [ μ mean_k max(0, γ − √(Cov(z)_kk + ε))
                                                            + ν/d² · Σ_{k≠l} R(z)_kl² ]

    as solo-learn's vibcreg_loss_func. Correlations of a constant feature, and of a single row, are 0. The paper also
    whitens features by IterNorm at the end of the projector, which is a layer of the model.

    Called as ``loss(view1, view2)``:

    - view1: a, [n, d]; n may differ between ranks.
    - view2: b, [n, d]; rows of one sample stand at the same index.

    Args:
        invariance: λ.
        variance: μ.
        covariance: ν.
        gamma: γ, the target standard deviation.
        eps: ε > 0.
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: an eps that is not positive, a number that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> a = torch.tensor([[0.0, 0.0], [0.6, 0.6]])   # variances 0.18; both correlations are 1
        >>> VIbCReg(variance=1.0, covariance=2.0, eps=0.07)(a, a)   # 2 · (½ + 1)
        tensor(3.)

    Source: Lee & Aune 2021, https://arxiv.org/abs/2109.00783
    """

    invariance: Number = 25.0
    variance: Number = 25.0
    covariance: Number = 200.0
    gamma: Number = 1.0
    eps: Annotated[float, Bounds("eps must be positive", above=0)] = 1e-4

    def compute(self, batch: Batch) -> Tensor:
        settings = batch.settings
        a, b = (batch.prepared(x, normalize=False) for x in batch.rows.values())
        loss = settings.invariance * batch.reduce((a - b).square().mean(1))
        for z in (a, b):
            x = centered(batch, z)
            squares = squared_sums(batch, x)
            deviation = (squares / max(1, batch.total - 1) + settings.eps).sqrt()
            norms = squares.clamp(min=LEAST_SQUARE).sqrt()
            correlation = second_moments(batch, x, x) / norms[:, None] / norms
            loss = loss + settings.variance * (settings.gamma - deviation).relu().mean()
            loss = loss + settings.covariance * off_diagonal(correlation).square().mean()
        return loss
