"""VIbCReg: VICReg with correlations of features, normalised over the batch, in place of covariances."""

from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.moments import centered, off_diagonal, second_moments, squared_sums
from contrastive_zoo.engine.reduction import reduce_anchors
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.preparation import begin_views
from contrastive_zoo.losses.vicreg import settings_problem
from contrastive_zoo.world import ALONE, World


@checked
def vibcreg(
    view1: Float[Tensor, "n d"],
    view2: Float[Tensor, "n d"],
    *,
    invariance: float = 25.0,
    variance: float = 25.0,
    covariance: float = 200.0,
    gamma: float = 1.0,
    eps: float = 1e-4,
    world: World = ALONE,
) -> Float[Tensor, ""]:
    r"""Compute the variance-invariance-better-covariance regularisation; embeddings are not normalised.

    With Cov the covariance (over N − 1) and R the correlation matrix of the features over the rows of all ranks,

        loss = λ mean_{i,k} (a_ik − b_ik)²  +  Σ_{z∈{a,b}} [ μ mean_k max(0, γ − √(Cov(z)_kk + ε))
                                                            + ν/d² · Σ_{k≠l} R(z)_kl² ]

    as solo-learn's vibcreg_loss_func. Correlations of a constant feature, and of a single row, are 0. The paper also
    whitens features by IterNorm at the end of the projector, which is a layer of the model.

    Args:
        view1: a, [n, d]; n may differ between ranks.
        view2: b, [n, d]; rows of one sample stand at the same index.
        invariance: λ.
        variance: μ.
        covariance: ν.
        gamma: γ, the target standard deviation.
        eps: ε > 0.
        world: the ranks that share the batch.

    Raises:
        ValueError: an eps that is not positive, a number that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> a = torch.tensor([[0.0, 0.0], [0.6, 0.6]])   # variances 0.18; both correlations are 1
        >>> vibcreg(a, a, variance=1.0, covariance=2.0, eps=0.07)   # 2 · (½ + 1)
        tensor(3.)

    Source: Lee & Aune 2021, https://arxiv.org/abs/2109.00783
    """
    weights = {"invariance": invariance, "variance": variance, "covariance": covariance, "gamma": gamma, "eps": eps}
    (a, b), shards = begin_views(
        "VIbCReg", (view1, view2), normalize=False, problem=settings_problem(**weights), world=world, **weights
    )
    loss = invariance * reduce_anchors((a - b).square().mean(1), world=world)
    for z in (a, b):
        x = centered(z, shards=shards, world=world)
        squares = squared_sums(x, world=world)
        deviation = (squares / max(1, shards.total - 1) + eps).sqrt()
        norms = squares.clamp(min=_LEAST_SQUARE).sqrt()
        correlation = second_moments(x, x, world=world) / norms[:, None] / norms
        loss = loss + variance * (gamma - deviation).relu().mean()
        loss = loss + covariance * off_diagonal(correlation).square().mean()
    return loss


_LEAST_SQUARE = 1e-24
"""The square of the smallest norm by which ``torch.nn.functional.normalize`` divides."""


class VIbCReg(Loss, function=vibcreg, check=settings_problem): ...
