"""W-MSE: equal views after whitening, so that embeddings cannot collapse."""

from itertools import combinations
from typing import Annotated

import torch
from torch import Tensor
from torch.linalg import vector_norm

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.precision import matmul, unit_rows, without_autocast
from contrastive_zoo.engine.statistics import centered, inverse_cholesky
from contrastive_zoo.loss_base.families import ViewLoss
from contrastive_zoo.loss_base.settings import Bounds, Reduction
from contrastive_zoo.ranks import devices


class WMSE(ViewLoss):
    r"""Compute the squared distance of views that are whitened by the covariance of all ranks and then normalised.

    With C_v the covariance of view v over the rows of all ranks and m_v their mean, of d features,

        L_v L_vᵀ = (1 − ε) C_v + ε tr(C_v)/d I        u_vi = L_v⁻¹ (z_vi − m_v), divided by its length
        loss_i   = mean_{v<w} ‖u_vi − u_wi‖²

    Dense, without ε: ``normalize((z - z.mean(0)) @ inv(cholesky(cov(z.T))).T)``. The gradient passes through mean and
    covariance. A sample of which a view is the mean to 6 digits has no direction there, and does not count.

    The paper whitens random sub-batches of the process's own samples, several times, and ε is 0. Its loss therefore
    depends on the number of processes; whitening all samples once has no such parameter. It needs N ≥ 2d to be well
    conditioned; ε, relative to the mean variance, makes it so for any N and scale.

    Called as ``loss(view1, view2, …)``: two or more views of the same samples, [n, d] each; n may differ between ranks.

    Args:
        eps: ε, above 0, at most 1.
        reduction: ``"mean"`` over all ranks' samples, ``"sum"``, or ``"none"`` for the local samples, [n].
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: an eps outside of its bounds, or too small for rounding not to make the covariance indefinite (looked at
            on a CPU; elsewhere the loss is NaN), or what any :class:`Loss` refuses.

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
