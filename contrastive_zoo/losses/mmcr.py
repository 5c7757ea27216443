"""MMCR: views of a sample on one point, and these points in all directions, measured by nuclear norms."""

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.precision import matmul, without_autocast
from contrastive_zoo.engine.statistics import eigenvalues, second_moments
from contrastive_zoo.loss_base.families import ViewLoss
from contrastive_zoo.loss_base.settings import Number, Positive


class MMCR(ViewLoss):
    r"""Compute minus the nuclear norm of the samples' centroids plus the mean nuclear norm of each sample's views.

    With Z_i the matrix [V, d] of unit rows of the V views of sample i, c_i their mean, C the centroids of all ranks,
    [N, d], and σ_k(·) the singular values of a matrix,

        loss = −Σ_k ( √(σ_k(C)² + ε) − √ε )  +  λ mean_i Σ_k ( √(σ_k(Z_i)² + ε) − √ε )

    For ε → 0 these are nuclear norms. A nuclear norm has no gradient where a singular value is 0: if rows repeat, lie on
    a line, or views are equal. The gradient of this sum exists everywhere, and a singular value of 0 adds nothing. Its
    value differs from the nuclear norms by at most √ε per singular value that is not 0.

    The squares of σ(C) are the eigenvalues of CᵀC, so ranks exchange d × d numbers, also for N < d. Rounding CᵀC, by u N
    for numbers of precision u, moves the value by at most u N/√ε per singular value of 0, and the gradient by as much:
    in float64 different splits agree to 1e-10 up to N = 1,000 with the default ε. In float32 choose a larger ε.

    Called as ``loss(view1, view2, …)``: two or more views of the same samples, [n, d] each; n may differ between ranks.

    Args:
        lambda_: λ; 0 leaves the views' norms out. lightly's default is 0.005.
        eps: ε > 0.
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: a lambda_ that is not finite, an eps that is not positive, or what any :class:`Loss` refuses.

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
