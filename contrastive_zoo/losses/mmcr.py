"""MMCR: views of a sample on one point, and these points in all directions, measured by nuclear norms."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.moments import second_moments
from contrastive_zoo.engine.precision import matmul, without_autocast
from contrastive_zoo.engine.reduction import reduce_anchors
from contrastive_zoo.engine.spectral import eigenvalues
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.checks import number_problem, positive_problem
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.preparation import begin_views
from contrastive_zoo.world import ALONE, World


@checked
def mmcr(
    *views: Float[Tensor, "n d"], lambda_: float = 0.0, eps: float = 1e-6, world: World = ALONE
) -> Float[Tensor, ""]:
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

    Args:
        views: two or more views of the same samples, [n, d] each; n may differ between ranks.
        lambda_: λ; 0 leaves the views' norms out. lightly's default is 0.005.
        eps: ε > 0.
        world: the ranks that share the batch.

    Raises:
        ValueError: a lambda_ that is not finite, an eps that is not positive, or what any :class:`Loss` refuses.

    Examples:
        >>> mmcr(torch.eye(2), torch.eye(2), lambda_=1.0, eps=1e-12)   # −(1 + 1) + √2
        tensor(-0.5858)

    Source: Yerxa et al. 2023, eq. 4, https://arxiv.org/abs/2303.03307
    """
    rows, _ = begin_views("MMCR", views, problem=_settings_problem(lambda_, eps), lambda_=lambda_, eps=eps, world=world)
    z = torch.stack(rows, 1)
    centroids = z.mean(1)
    spread = _smooth_nuclear_norm(second_moments(centroids, centroids, world=world), eps)
    return lambda_ * reduce_anchors(_smooth_nuclear_norm(_products(z), eps), world=world) - spread


def _settings_problem(lambda_: float, eps: float) -> str | None:
    return number_problem(lambda_=lambda_) or positive_problem(eps=eps)


class MMCR(Loss, function=mmcr, check=_settings_problem): ...


@without_autocast
def _products(z: Float[Tensor, "n v d"]) -> Float[Tensor, "n v v"]:
    return matmul(z, z.mT)


@without_autocast
def _smooth_nuclear_norm(squares: Float[Tensor, "... k k"], eps: float) -> Float[Tensor, "..."]:
    """Return Σ_k (√(λ_k + ε) − √ε) of the eigenvalues of symmetric matrices, of which rounding makes some negative."""
    return ((eigenvalues(squares).clamp(min=0) + eps).sqrt() - math.sqrt(eps)).sum(-1)
