# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.world import ALONE, World

def w_mse(
    *views: Float[Tensor, "n d"], eps: float = 0.001, reduction: Reduction = "mean", world: World = ALONE
) -> Float[Tensor, "..."]:
    """Compute the squared distance of views that are whitened by the covariance of all ranks and then normalised.

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

class WMSE(Loss):
    """Compute the squared distance of views that are whitened by the covariance of all ranks and then normalised.

    With C_v the covariance of view v over the rows of all ranks and m_v their mean, of d features,

        L_v L_vᵀ = (1 − ε) C_v + ε tr(C_v)/d I        u_vi = L_v⁻¹ (z_vi − m_v), divided by its length
        loss_i   = mean_{v<w} ‖u_vi − u_wi‖²

    Dense, without ε: ``normalize((z - z.mean(0)) @ inv(cholesky(cov(z.T))).T)``. The gradient passes through mean and
    covariance. A sample of which a view is the mean to 6 digits has no direction there, and does not count.

    The paper whitens random sub-batches of the process's own samples, several times, and ε is 0. Its loss therefore
    depends on the number of processes; whitening all samples once has no such parameter. It needs N ≥ 2d to be well
    conditioned; ε, relative to the mean variance, makes it so for any N and scale.

    Called as ``loss(view1, view2, …)``:

    - views: two or more views of the same samples, [n, d] each; n may differ between ranks.

    Args:
        eps: ε, above 0, at most 1.
        reduction: ``"mean"`` over all ranks' samples, ``"sum"``, or ``"none"`` for the local samples, [n].
        check_finite: whether NaN and infinite embeddings are refused.

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

    eps: float
    reduction: Reduction
    check_finite: bool

    def __init__(self, *, eps: float = 0.001, reduction: Reduction = "mean", check_finite: bool = True) -> None: ...
    def __call__(self, *views: Float[Tensor, "n d"], world: World | None = None) -> Tensor: ...
