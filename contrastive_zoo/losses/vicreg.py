"""VICReg: equal embeddings of two views, a minimum variance of each feature, uncorrelated features."""

from typing import Annotated

import torch  # noqa: F401 - the examples use it
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.statistics import centered, off_diagonal, second_moments
from contrastive_zoo.loss_base.families import TwoViewLoss
from contrastive_zoo.loss_base.loss import SENDS_NO_ROWS
from contrastive_zoo.loss_base.settings import Bounds, Number


class VICReg(TwoViewLoss):
    r"""Compute the variance-invariance-covariance regularisation; embeddings are not normalised.

    With Cov the covariance (over N − 1) of the rows of all ranks,

        loss = λ mean_{i,k} (a_ik − b_ik)²  +  Σ_{z∈{a,b}} [ μ/2 · mean_k max(0, γ − √(Cov(z)_kk + ε))
                                                            + ν/d · Σ_{k≠l} Cov(z)_kl² ]

    as in the authors' code, lightly and pytorch-metric-learning. The paper sums (a − b)² over features and does not
    halve the variance term: ``invariance=25 * d, variance=50``. The variance of a single row counts as 0.
    The terms have the units of features to the powers 2, 1 and 4.

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
        >>> a = torch.tensor([[0.0], [0.6]])   # variance 0.18
        >>> VICReg(invariance=1.0, variance=1.0, gamma=1.0, eps=0.07)(a, a)   # 1 − √0.25
        tensor(0.5000)

    Source: Bardes et al. 2022, eqs. 1-6, https://arxiv.org/abs/2105.04906
    """

    invariance: Number = 25.0
    variance: Number = 25.0
    covariance: Number = 1.0
    gamma: Number = 1.0
    eps: Annotated[float, Bounds("eps must be positive", above=0)] = 1e-4

    ring_refusal = SENDS_NO_ROWS

    def degrees(self, count: int) -> int:
        """Return what the covariances of so many rows are divided by."""
        return max(1, count - 1)

    def compute(self, batch: Batch) -> Tensor:
        settings = batch.settings
        a, b = (batch.prepared(x, normalize=False) for x in batch.rows.values())
        loss = settings.invariance * batch.reduce((a - b).square().mean(1))
        for z in (a, b):
            x = centered(batch, z)
            cov = second_moments(batch, x, x) / self.degrees(batch.total)
            deviation = (cov.diagonal() + settings.eps).sqrt()
            loss = loss + settings.variance / 2 * (settings.gamma - deviation).relu().mean()
            loss = loss + settings.covariance * off_diagonal(cov).square().sum() / len(cov)
        return loss
