"""Moments and spectra of features: views agree, and features vary, do not repeat each other, and fill all directions."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.cost import Entry
from contrastive_zoo.engine.statistics import centered, off_diagonal, second_moments
from contrastive_zoo.loss_base.families import TwoViewLoss
from contrastive_zoo.loss_base.loss import CallInputs, Inputs, Loss
from contrastive_zoo.loss_base.settings import Momentum, NonNegative, Number, Positive, Size, field
from contrastive_zoo.loss_base.state import Averages
from contrastive_zoo.ranks.row_checks import described


class BarlowTwins(TwoViewLoss, engine="statistics"):
    r"""Compute the redundancy reduction loss; features are normalised over the batch, embeddings are not.

    Called as ``loss(view1, view2)``, [n, d] each.
    With C the cross-correlation of features over the embeddings of all ranks, of standard deviations √(variance + ε),

        loss = Σ_k (1 − C_kk)²  +  λ Σ_{k≠l} C_kl²

    with variances over N and ε as in the authors' ``BatchNorm1d(affine=False)``. Their code multiplies the loss by about
    0.024. The correlations of a single sample are 0.

    Args:
        lambda_: λ ≥ 0.
        eps: ε > 0, in units of squared features.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> a = torch.tensor([[1.0], [-1.0]])
        >>> BarlowTwins()(a, -a)   # (1 + 1)²
        tensor(4.0000)

    Source: Zbontar et al. 2021, eqs. 1-2, https://arxiv.org/abs/2103.03230
    """

    lambda_: NonNegative = 0.0051
    eps: Positive = 1e-5

    def entries(self, stated: CallInputs) -> list[Entry]:
        of_view = stated.features(partial=True), stated.features()
        return [stated.held(3.2), *of_view, *of_view, *stated.products()]

    def compute(self, batch: Batch) -> Tensor:
        a, b = (centered(batch, batch.prepared(x, normalize=False)) for x in batch.rows.values())
        sums = (batch.sum(x.square().sum(0), gradient="complete") for x in (a, b))
        spread_a, spread_b = ((x / batch.total + batch.settings.eps).sqrt() for x in sums)
        correlation = second_moments(batch, a, b) / batch.total / spread_a[:, None] / spread_b
        redundancy = off_diagonal(correlation).square().sum()
        return (1 - correlation.diagonal()).square().sum() + batch.settings.lambda_ * redundancy


class VICReg(TwoViewLoss, engine="statistics"):
    r"""Compute the variance-invariance-covariance regularisation; embeddings are not normalised.

    Called as ``loss(view1, view2)``, [n, d] each.
    With Cov the covariance (over N − 1) of the embeddings of all ranks,

        loss = λ mean_{i,k} (a_ik − b_ik)²  +  Σ_{z∈{a,b}} [ μ/2 · mean_k max(0, γ − √(Cov(z)_kk + ε))
                                                            + ν/d · Σ_{k≠l} Cov(z)_kl² ]

    as in the authors' code, lightly and pytorch-metric-learning. The paper sums (a − b)² over features and does not
    halve the variance term: ``invariance=25 * d, variance=50``. The variance of a single sample counts as 0.

    Args:
        invariance: λ.
        variance: μ.
        covariance: ν.
        gamma: γ, the target standard deviation.
        eps: ε > 0.
        check_finite: refuse NaN and infinite embeddings.

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
    eps: Positive = 1e-4

    def entries(self, stated: CallInputs) -> list[Entry]:
        return [stated.held(3), *self.reduced(), *[stated.features(partial=True), *stated.products()] * 2]

    def compute(self, batch: Batch) -> Tensor:
        a, b = (batch.prepared(x, normalize=False) for x in batch.rows.values())
        loss = batch.settings.invariance * batch.reduce((a - b).square().mean(1))
        return loss + self._of_features(batch, centered(batch, a)) + self._of_features(batch, centered(batch, b))

    def _of_features(self, batch: Batch, x: Tensor) -> Tensor:
        """Return the terms of the variances and of the covariances of centred features."""
        settings = batch.settings
        cov = second_moments(batch, x, x) / max(1, batch.total - 1)
        of_variances = (settings.gamma - (cov.diagonal() + settings.eps).sqrt()).relu().mean()
        return settings.variance / 2 * of_variances + settings.covariance * off_diagonal(cov).square().sum() / len(cov)


class CyclicConsistency(Loss, engine="statistics"):
    r"""Compute CyCLIP's two penalties: similarities of images and texts should be symmetric, and equal within both.

    Called as ``loss(images, texts)``, [n, d] each.
    With x, y the unit embeddings of all ranks,

        loss = λ/N Σ_ij (x_i·y_j − x_j·y_i)²  +  μ/N Σ_ij (x_i·x_j − y_i·y_j)²

    It takes sums of products of features, and no N × N matrix. CyCLIP is ``WeightedSum([Clip(), CyclicConsistency()])``.

    Args:
        cross_modal: λ ≥ 0.
        in_modal: μ ≥ 0.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> x = torch.eye(2)
        >>> CyclicConsistency(cross_modal=1.0, in_modal=0.0)(x, x.flip(0) * torch.tensor([1.0, -1.0]))   # (2² + 2²) / 2
        tensor(4.)

    Source: Goel et al. 2022, eqs. 2-3, https://arxiv.org/abs/2205.14459
    """

    cross_modal: NonNegative = 0.25
    in_modal: NonNegative = 0.25

    def inputs(self, images: Float[Tensor, "n d"], texts: Float[Tensor, "n d"]) -> Inputs:
        return Inputs({"images": images, "texts": texts})

    def entries(self, stated: CallInputs) -> list[Entry]:
        return [stated.held(3.3), *[entry for _ in range(3) for entry in stated.products()]]

    def compute(self, batch: Batch) -> Tensor:
        x, y = (batch.prepared(of, normalize=True) for of in batch.rows.values())
        # with p_ij = (x_i − y_i)·(x_j + y_j), which is small where images and texts nearly agree, the two differences are
        # (p_ij ∓ p_ji) / 2; moments of x and y themselves would be large numbers that cancel
        d, s = x - y, x + y
        dd, ss, ds = (second_moments(batch, *pair) for pair in ((d, d), (s, s), (d, s)))
        squares, mixed = (dd * ss).sum(), (ds * ds.T).sum()  # Σ p_ij² and Σ p_ij p_ji
        cross_modal, in_modal = (squares - mixed) / 2, (squares + mixed) / 2
        return (batch.settings.cross_modal * cross_modal + batch.settings.in_modal * in_modal) / batch.total


class TiCo(TwoViewLoss, Averages, engine="statistics"):
    r"""Compute transformation invariance and covariance contrast.

    Called as ``loss(view1, view2)``, [n, d] each; the second is usually a momentum encoder's.
    With a, b the unit embeddings of the two views of all ranks and M the moving average of past second moments,

        C = β M + (1 − β)/N Σ_i a_i a_iᵀ
        loss = mean_i [ 1 − a_i·b_i  +  ρ a_iᵀ C a_i ]

    C has no gradient. M is the buffer ``covariance``, which starts at 0. In training mode each call stores C in it: it is
    equal on every rank, and equal to that of one process. If a step has several calls, use
    :func:`contrastive_zoo.one_step`. Equal to lightly's TiCoLoss.

    Args:
        embedding_size: the width of embeddings, d.
        beta: β, 0 … 1.
        rho: ρ.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> eye = torch.eye(2)
        >>> TiCo(2, beta=0.5, rho=1.0)(eye, eye)   # 0 + ½ · ½
        tensor(0.2500)

    Source: Zhu et al. 2022, https://arxiv.org/abs/2206.10698
    """

    embedding_size: Size = field(kw_only=False)
    beta: Momentum = 0.9
    rho: Number = 8.0

    covariance: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.covariance = nn.Buffer(torch.zeros(self.embedding_size, self.embedding_size))

    def inputs(self, view1: Float[Tensor, "n d"], view2: Float[Tensor, "n d"]) -> Inputs:
        problem, width = None, view1.shape[-1]
        if self.covariance.shape != (width, width):
            got = f"got {described(self.covariance)} for views {described(view1)}"
            problem = f"the covariance is as wide as embeddings, {got}. Construct TiCo(embedding_size={width})."
        return Inputs({"view 0": view1, "view 1": view2}, problem)

    def entries(self, stated: CallInputs) -> list[Entry]:
        return [stated.held(3.3), *stated.products(), *self.reduced()]

    def compute(self, batch: Batch) -> Tensor:
        beta = batch.settings.beta
        a, b = (batch.prepared(x, normalize=True) for x in batch.rows.values())
        total = second_moments(batch, a, a)
        sums = torch.cat([total.detach().flatten(), total.new_full((1,), batch.total)])
        (contrast,) = self.moved(beta, sums)
        loss = batch.reduce(1 - (a * b).sum(1)) + batch.settings.rho * (total / batch.total * contrast).sum()
        if self.moves:
            self.record((beta, sums))
        return loss

    def averages(self, sums: Tensor) -> dict[str, Tensor]:
        return {"covariance": (sums[:-1] / sums[-1]).view_as(self.covariance)}
