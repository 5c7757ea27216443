"""Spectra of features: views agree, and embeddings fill all directions."""

from itertools import combinations
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor
from torch.linalg import vector_norm

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.precision import matmul, unit_rows, without_autocast
from contrastive_zoo.engine.statistics import centered, divided_by_norms, eigenvalues, inverse_cholesky, second_moments
from contrastive_zoo.loss_base.families import ViewLoss
from contrastive_zoo.loss_base.settings import Bounds, Number, Positive, Reduction
from contrastive_zoo.ranks import devices


class FroSSL(ViewLoss):
    r"""Compute the log of the squared Frobenius norm of each view's second moments plus the distance of views.

    Called as ``loss(view1, view2, …)``, two or more of [n, d].
    With ẑ_v the V views, each feature divided by its norm over the rows of all ranks, d features and m = mean_v ẑ_v,

        loss = Σ_v [ log ‖ẑ_vᵀ ẑ_v / tr(ẑ_vᵀ ẑ_v)‖_F²  +  λ V/N Σ_i ‖ẑ_vi − m_i‖² ]

    The traces, which are d unless a feature is 0 everywhere, have no gradient. Equal to lightly's FroSSLLoss. The
    first term is at least −log d. Only d × d matrices exist, also for N < d. A view of zeros has no first term.

    Args:
        invariance: λ.

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


class MMCR(ViewLoss):
    r"""Compute minus the nuclear norm of the samples' centroids plus the mean nuclear norm of each sample's views.

    Called as ``loss(view1, view2, …)``, two or more of [n, d].
    With Z_i the matrix [V, d] of unit rows of the V views of sample i, c_i their mean, C the centroids of all ranks,
    [N, d], and σ_k(·) the singular values of a matrix,

        loss = −Σ_k ( √(σ_k(C)² + ε) − √ε )  +  λ mean_i Σ_k ( √(σ_k(Z_i)² + ε) − √ε )

    For ε → 0 these are nuclear norms. A nuclear norm has no gradient where a singular value is 0: if rows repeat, lie on
    a line, or views are equal. The gradient of this sum exists everywhere, and a singular value of 0 adds nothing. Its
    value differs from the nuclear norms by at most √ε per singular value that is not 0.

    The squares of σ(C) are the eigenvalues of CᵀC, so ranks exchange d × d numbers, also for N < d. Rounding CᵀC, by u N
    for numbers of precision u, moves the value by at most u N/√ε per singular value of 0, and the gradient by as much:
    in float64 different splits agree to 1e-10 up to N = 1,000 with the default ε. In float32 choose a larger ε.

    Args:
        lambda_: λ; 0 leaves the views' norms out. lightly's default is 0.005.
        eps: ε > 0.

    Examples:
        >>> MMCR(lambda_=1.0, eps=1e-12)(torch.eye(2), torch.eye(2))   # −(1 + 1) + √2
        tensor(-0.5858)

    Source: Yerxa et al. 2023, eq. 4, https://arxiv.org/abs/2303.03307
    """

    lambda_: Number = 0.0
    eps: Positive = 1e-6

    def compute(self, batch: Batch) -> Tensor:
        z, eps = torch.stack([batch.prepared(x, normalize=True) for x in batch.rows.values()], 1), batch.settings.eps
        centroids = z.mean(1)
        spread = _smooth_nuclear_norm(second_moments(batch, centroids, centroids), eps)
        return batch.settings.lambda_ * batch.reduce(_smooth_nuclear_norm(_products(z), eps)) - spread


@without_autocast
def _products(z: Float[Tensor, "n v d"]) -> Float[Tensor, "n v v"]:
    return matmul(z, z.mT)


@without_autocast
def _smooth_nuclear_norm(squares: Float[Tensor, "... k k"], eps: float) -> Float[Tensor, "..."]:
    """Return Σ_k (√(λ_k + ε) − √ε) of the eigenvalues of symmetric matrices, of which rounding makes some negative."""
    return ((eigenvalues(squares).clamp(min=0) + eps).sqrt() - eps**0.5).sum(-1)


class WMSE(ViewLoss):
    r"""Compute the squared distance of views that are whitened by the covariance of all ranks and then normalised.

    Called as ``loss(view1, view2, …)``, two or more of [n, d].
    With C_v the covariance of view v over the rows of all ranks and m_v their mean, of d features,

        L_v L_vᵀ = (1 − ε) C_v + ε tr(C_v)/d I        u_vi = L_v⁻¹ (z_vi − m_v), divided by its length
        loss_i   = mean_{v<w} ‖u_vi − u_wi‖²

    Dense, without ε: ``normalize((z - z.mean(0)) @ inv(cholesky(cov(z.T))).T)``. The gradient passes through mean and
    covariance. A sample of which a view is the mean to 6 digits has no direction there, and does not count.

    The paper whitens random sub-batches of the process's own samples, several times, and ε is 0. Its loss therefore
    depends on the number of processes; whitening all samples once has no such parameter. It needs N ≥ 2d to be well
    conditioned; ε, relative to the mean variance, makes it so for any N and scale.

    Args:
        eps: ε, above 0, at most 1.

    Raises:
        ValueError: an eps so small that rounding makes the covariance indefinite (on a CPU; elsewhere the loss is NaN).

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
        >>> WMSE()(z, -z)   # opposite unit vectors: 2²
        tensor(4.)
        >>> WMSE(eps=1e-9)(z, z @ torch.tensor([[3.0, 1.0], [0.0, 2.0]])).abs() < 1e-5   # undone
        tensor(True)

    Source: Ermolov et al. 2021, §3, https://arxiv.org/abs/2007.06346
    """

    eps: Annotated[float, Bounds("eps is above 0 and at most 1", above=0, high=1)] = 1e-3
    reduction: Reduction = "mean"

    def compute(self, batch: Batch) -> Tensor:
        rows = [batch.prepared(x, normalize=False) for x in batch.rows.values()]
        whitened, directed = zip(*(_whitened(batch, z) for z in rows), strict=True)
        cosine = torch.stack([(u * v).sum(1) for u, v in combinations(whitened, 2)]).mean(0)
        return batch.reduce(2 - 2 * cosine, torch.stack(directed).all(0), reduction=self.reduction)


@without_autocast
def _whitened(batch: Batch, z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the whitened local rows with unit length, and which of them differ from the mean."""
    x, d, eps = centered(batch, z), z.shape[1], batch.settings.eps
    directed = vector_norm(x.detach(), dim=1) > _LEAST_DISTANCE * vector_norm(z.detach(), dim=1)
    # each rank whitens its local rows only, so gradients are summed over ranks
    covariance = batch.sum(matmul(x.T, x), gradient="partial") / max(1, batch.total - 1)
    variance = covariance.trace() / d
    eye = torch.eye(d, dtype=x.dtype, device=x.device)
    relative = (1 - eps) * covariance / variance.where(variance > 0, 1) + eps * eye
    inverse = inverse_cholesky(relative)  # the scale of L does not change a direction
    if devices.on_cpu(inverse) and not inverse.isfinite().all():  # equal on every rank, as the covariance is
        raise ValueError(
            f"{batch.name}: the covariance has no inverse up to rounding with eps={eps}. Pass a larger eps."
        )
    return unit_rows(matmul(x, inverse.T).where(directed[:, None], 1)), directed


_LEAST_DISTANCE = 1e-6
"""Distance from the mean, relative to the norm, below which float32 holds no digit of the direction."""
