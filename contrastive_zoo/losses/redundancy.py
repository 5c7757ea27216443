"""Moments of features: views agree, features vary, and do not repeat each other."""

from typing import Annotated

import torch
from torch import Tensor, nn

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.statistics import LEAST_SQUARE, centered, off_diagonal, second_moments, squared_sums
from contrastive_zoo.loss_base.families import TwoViewLoss
from contrastive_zoo.loss_base.inputs import Inputs
from contrastive_zoo.loss_base.loss import SENDS_NO_ROWS
from contrastive_zoo.loss_base.numbers import move_towards, of_size
from contrastive_zoo.loss_base.settings import Bounds, Momentum, NonNegative, Number, field
from contrastive_zoo.ranks.row_checks import described, views_problem


class BarlowTwins(TwoViewLoss):
    r"""Compute the redundancy reduction loss; features are normalised over the batch, embeddings are not.

    Called as ``loss(view1, view2)``, [n, d] each.
    With C the cross-correlation of features over the rows of all ranks, with standard deviations √(variance + ε) over N,

        loss = Σ_k (1 − C_kk)²  +  λ Σ_{k≠l} C_kl²

    ε and the divisor N are those of the authors' ``BatchNorm1d(affine=False)``; the paper has ε = 0. The authors' code
    multiplies the loss by about 0.024 for its optimiser; lightly has ``lambda_=5e-3``. The correlations of a single row
    are 0. The loss has no unit.

    Args:
        lambda_: λ ≥ 0.
        eps: ε > 0, in units of squared features.

    Examples:
        >>> a = torch.tensor([[1.0], [-1.0]])
        >>> BarlowTwins()(a, -a)   # (1 + 1)²
        tensor(4.0000)

    Source: Zbontar et al. 2021, eqs. 1-2, https://arxiv.org/abs/2103.03230
    """

    lambda_: NonNegative = 0.0051
    eps: Annotated[float, Bounds("eps must be positive", above=0)] = 1e-5

    ring_refusal = SENDS_NO_ROWS

    def compute(self, batch: Batch) -> Tensor:
        a, b = (centered(batch, batch.prepared(x, normalize=False)) for x in batch.rows.values())
        spread_a, spread_b = ((squared_sums(batch, x) / batch.total + batch.settings.eps).sqrt() for x in (a, b))
        correlation = second_moments(batch, a, b) / batch.total / spread_a[:, None] / spread_b
        redundancy = off_diagonal(correlation).square().sum()
        return (1 - correlation.diagonal()).square().sum() + batch.settings.lambda_ * redundancy


class VICReg(TwoViewLoss):
    r"""Compute the variance-invariance-covariance regularisation; embeddings are not normalised.

    Called as ``loss(view1, view2)``, [n, d] each.
    With Cov the covariance (over N − 1) of the rows of all ranks,

        loss = λ mean_{i,k} (a_ik − b_ik)²  +  Σ_{z∈{a,b}} [ μ/2 · mean_k max(0, γ − √(Cov(z)_kk + ε))
                                                            + ν/d · Σ_{k≠l} Cov(z)_kl² ]

    as in the authors' code, lightly and pytorch-metric-learning. The paper sums (a − b)² over features and does not
    halve the variance term: ``invariance=25 * d, variance=50``. The variance of a single row counts as 0.
    The terms have the units of features to the powers 2, 1 and 4.

    Args:
        invariance: λ.
        variance: μ.
        covariance: ν.
        gamma: γ, the target standard deviation.
        eps: ε > 0.

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
        a, b = (batch.prepared(x, normalize=False) for x in batch.rows.values())
        loss = batch.settings.invariance * batch.reduce((a - b).square().mean(1))
        for z in (a, b):
            of_variances, of_covariances = self._terms(batch, centered(batch, z))
            loss = loss + of_variances + of_covariances
        return loss

    def _terms(self, batch: Batch, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the terms of the variances and of the covariances of centred features."""
        settings = batch.settings
        cov = second_moments(batch, x, x) / self.degrees(batch.total)
        deviation = (cov.diagonal() + settings.eps).sqrt()
        of_variances = settings.variance / 2 * (settings.gamma - deviation).relu().mean()
        return of_variances, settings.covariance * off_diagonal(cov).square().sum() / len(cov)


class VIbCReg(VICReg):
    r"""Compute the variance-invariance-better-covariance regularisation; embeddings are not normalised.

    Called as ``loss(view1, view2)``, [n, d] each.
    With Cov the covariance (over N − 1) and R the correlation matrix of the features over the rows of all ranks,

        loss = λ mean_{i,k} (a_ik − b_ik)²  +  Σ_{z∈{a,b}} [ μ mean_k max(0, γ − √(Cov(z)_kk + ε))
                                                            + ν/d² · Σ_{k≠l} R(z)_kl² ]

    as solo-learn's vibcreg_loss_func. Correlations of a constant feature, and of a single row, are 0. The paper also
    whitens features by IterNorm at the end of the projector, which is a layer of the model.

    Args:
        covariance: ν; the other settings are those of :class:`VICReg`.

    Examples:
        >>> a = torch.tensor([[0.0, 0.0], [0.6, 0.6]])   # variances 0.18; both correlations are 1
        >>> VIbCReg(variance=1.0, covariance=2.0, eps=0.07)(a, a)   # 2 · (½ + 1)
        tensor(3.)

    Source: Lee & Aune 2021, https://arxiv.org/abs/2109.00783
    """

    covariance: Number = 200.0

    ring_refusal = TwoViewLoss.ring_refusal

    def _terms(self, batch: Batch, x: Tensor) -> tuple[Tensor, Tensor]:
        settings, squares = batch.settings, squared_sums(batch, x)
        deviation = (squares / self.degrees(batch.total) + settings.eps).sqrt()
        norms = squares.clamp(min=LEAST_SQUARE).sqrt()
        correlation = second_moments(batch, x, x) / norms[:, None] / norms
        of_variances = settings.variance * (settings.gamma - deviation).relu().mean()
        return of_variances, settings.covariance * off_diagonal(correlation).square().mean()


class TiCo(TwoViewLoss):
    r"""Compute transformation invariance and covariance contrast.

    Called as ``loss(view1, view2)``, [n, d] each; the second is usually a momentum encoder's.
    With a, b the unit rows of the two views of all ranks and M the moving average of past second moments,

        C = β M + (1 − β)/N Σ_i a_i a_iᵀ
        loss = mean_i [ 1 − a_i·b_i  +  ρ a_iᵀ C a_i ]

    C has no gradient. Equal to lightly's TiCoLoss. Its memory is one d × d matrix, no queue of negatives.

    M is the buffer ``covariance``, which starts at 0. In training mode each call uses the buffer and then stores C in it:
    it is equal on every rank, and equal to that of one process.

    Args:
        embedding_size: d.
        beta: β, 0 … 1.
        rho: ρ.

    Raises:
        ValueError: an embedding_size above what memory holds, or a covariance of another width.

    Examples:
        >>> eye = torch.eye(2)
        >>> TiCo(2, beta=0.5, rho=1.0)(eye, eye)   # 0 + ½ · ½
        tensor(0.2500)

    Source: Zhu et al. 2022, https://arxiv.org/abs/2206.10698
    """

    embedding_size: Annotated[int, Bounds("embedding_size is at least 1", low=1, whole=True)] = field(kw_only=False)
    beta: Momentum = 0.9
    rho: Number = 8.0

    covariance: Tensor = field(init=False)

    def __post_init__(self) -> None:
        size = self.embedding_size = int(self.embedding_size)
        zeros = of_size(type(self).__name__, lambda: torch.zeros(size, size), embedding_size=size)
        self.covariance = nn.Buffer(zeros)

    def inputs(self, view1: Tensor, view2: Tensor) -> Inputs:
        problem = views_problem((view1, view2))
        if problem is None and self.covariance.shape != 2 * view1.shape[-1:]:
            got = f"got {described(self.covariance)} for views {described(view1)}"
            fix = f"Construct TiCo(embedding_size={view1.shape[-1]})."
            problem = f"the covariance is as wide as embeddings, {got}. {fix}"
        return Inputs({"view 0": view1, "view 1": view2}, problem)

    def compute(self, batch: Batch) -> Tensor:
        beta = batch.settings.beta
        a, b = (batch.prepared(x, normalize=True) for x in batch.rows.values())
        moments = second_moments(batch, a, a) / batch.total
        contrast = beta * self.covariance.to(moments) + (1 - beta) * moments.detach()
        loss = batch.reduce(1 - (a * b).sum(1)) + batch.settings.rho * (moments * contrast).sum()
        if self.training:
            with torch.no_grad():
                move_towards(self.covariance, moments, 1 - beta)
        return loss
