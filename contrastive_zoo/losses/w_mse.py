"""W-MSE: equal views after whitening, so that embeddings cannot collapse."""

from itertools import combinations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.linalg import vector_norm

from contrastive_zoo import devices
from contrastive_zoo.collectives import sum_over_ranks
from contrastive_zoo.engine.moments import centered
from contrastive_zoo.engine.precision import matmul, without_autocast
from contrastive_zoo.engine.reduction import Reduction, reduce_anchors
from contrastive_zoo.engine.spectral import inverse_cholesky
from contrastive_zoo.engine.unit_rows import unit_rows
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.checks import number_problem
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.numbers import real
from contrastive_zoo.loss_base.preparation import begin_views
from contrastive_zoo.world import ALONE, Shards, World


@checked
def w_mse(
    *views: Float[Tensor, "n d"], eps: float = 1e-3, reduction: Reduction = "mean", world: World = ALONE
) -> Float[Tensor, "..."]:
    r"""Compute the squared distance of views that are whitened by the covariance of all ranks and then normalised.

    With C_v the covariance of view v over the rows of all ranks and m_v their mean, of d features,

        L_v L_vᵀ = (1 − ε) C_v + ε tr(C_v)/d I        u_vi = L_v⁻¹ (z_vi − m_v), divided by its length
        loss_i   = mean_{v<w} ‖u_vi − u_wi‖²

    Dense, without ε: ``normalize((z - z.mean(0)) @ inv(cholesky(cov(z.T))).T)``. The gradient passes through mean and
    covariance. A sample of which a view is the mean to 6 digits has no direction there, and does not count.

    The paper whitens random sub-batches of the process's own samples, several times, and ε is 0. Its loss therefore
    depends on the number of processes; whitening all samples once has no such parameter. It needs N ≥ 2d to be well
    conditioned; ε, relative to the mean variance, makes it so for any N and scale.

    Args:
        views: two or more views of the same samples, [n, d] each; n may differ between ranks.
        eps: ε, above 0, at most 1.
        reduction: ``"mean"`` over all ranks' samples, ``"sum"``, or ``"none"`` for the local samples, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: an eps outside of its bounds, or too small for rounding not to make the covariance indefinite (looked at
            on a CPU; elsewhere the loss is NaN), or what any :class:`Loss` refuses.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
        >>> w_mse(z, -z)   # opposite unit vectors: 2²
        tensor(4.)
        >>> w_mse(z, z @ torch.tensor([[3.0, 1.0], [0.0, 2.0]]), eps=1e-9).abs() < 1e-5   # undone
        tensor(True)

    Source: Ermolov et al. 2021, §3, https://arxiv.org/abs/2007.06346
    """
    rows, shards = begin_views(
        "WMSE", views, normalize=False, problem=_settings_problem(eps), eps=eps, reduction=reduction, world=world
    )
    whitened, directed = zip(*(_whitened(z, real(eps), shards, world) for z in rows), strict=True)
    pairs = list(combinations(whitened, 2))
    cosine = torch.stack([(u * v).sum(1) for u, v in pairs]).mean(0)
    return reduce_anchors(2 - 2 * cosine, torch.stack(directed).all(0), reduction=reduction, world=world)


def _settings_problem(eps: float) -> str | None:
    return number_problem("eps is above 0 and at most 1", above=0, high=1, eps=eps)


class WMSE(Loss, function=w_mse, check=_settings_problem): ...


@without_autocast
def _whitened(z: Tensor, eps: float, shards: Shards, world: World) -> tuple[Tensor, Tensor]:
    """Return the whitened local rows with unit length, and which of them differ from the mean."""
    x, d = centered(z, shards=shards, world=world), z.shape[1]
    directed = vector_norm(x.detach(), dim=1) > _LEAST_DISTANCE * vector_norm(z.detach(), dim=1)
    # each rank whitens its local rows only, so gradients are summed over ranks
    covariance = sum_over_ranks(matmul(x.T, x), gradient="partial", world=world) / max(1, shards.total - 1)
    variance = covariance.trace() / d
    eye = torch.eye(d, dtype=x.dtype, device=x.device)
    relative = (1 - eps) * covariance / variance.where(variance > 0, 1) + eps * eye
    inverse = inverse_cholesky(relative)  # the scale of L does not change a direction
    if devices.on_cpu(inverse) and not inverse.isfinite().all():  # equal on every rank, as the covariance is
        raise ValueError(f"WMSE: the covariance has no inverse up to rounding with eps={eps}. Pass a larger eps.")
    return unit_rows(matmul(x, inverse.T).where(directed[:, None], 1)), directed


_LEAST_DISTANCE = 1e-6
"""Distance from the mean, relative to the norm, below which float32 holds no digit of the direction."""
