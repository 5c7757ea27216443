"""VICReg: equal embeddings of two views, a minimum variance of each feature, uncorrelated features."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.moments import centered, off_diagonal, second_moments
from contrastive_zoo.engine.reduction import reduce_anchors
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.checks import number_problem
from contrastive_zoo.loss_base.loss import SENDS_NO_ROWS, Loss
from contrastive_zoo.loss_base.preparation import begin_views
from contrastive_zoo.world import ALONE, World


@checked
def vicreg(
    view1: Float[Tensor, "n d"],
    view2: Float[Tensor, "n d"],
    *,
    invariance: float = 25.0,
    variance: float = 25.0,
    covariance: float = 1.0,
    gamma: float = 1.0,
    eps: float = 1e-4,
    world: World = ALONE,
) -> Float[Tensor, ""]:
    r"""Compute the variance-invariance-covariance regularisation; embeddings are not normalised.

    With Cov the covariance (over N − 1) of the rows of all ranks,

        loss = λ mean_{i,k} (a_ik − b_ik)²  +  Σ_{z∈{a,b}} [ μ/2 · mean_k max(0, γ − √(Cov(z)_kk + ε))
                                                            + ν/d · Σ_{k≠l} Cov(z)_kl² ]

    as in the authors' code, lightly and pytorch-metric-learning. The paper sums (a − b)² over features and does not
    halve the variance term: ``invariance=25 * d, variance=50``. The variance of a single row counts as 0.
    The terms have the units of features to the powers 2, 1 and 4.

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
        >>> a = torch.tensor([[0.0], [0.6]])   # variance 0.18
        >>> vicreg(a, a, invariance=1.0, variance=1.0, gamma=1.0, eps=0.07)   # 1 − √0.25
        tensor(0.5000)

    Source: Bardes et al. 2022, eqs. 1-6, https://arxiv.org/abs/2105.04906
    """
    weights = {"invariance": invariance, "variance": variance, "covariance": covariance, "gamma": gamma, "eps": eps}
    return vicreg_over(view1, view2, degrees=lambda count: max(1, count - 1), **weights, world=world)


def vicreg_over(
    view1: Float[Tensor, "n d"],
    view2: Float[Tensor, "n d"],
    *,
    degrees: Callable[[int], int],
    invariance: float,
    variance: float,
    covariance: float,
    gamma: float,
    eps: float,
    world: World,
) -> Float[Tensor, ""]:
    """Compute :func:`vicreg` with covariances that are divided by ``degrees(N)``, for N rows.

    Examples:
        >>> import torch
        >>> weights = {"invariance": 1.0, "variance": 1.0, "covariance": 1.0, "gamma": 1.0, "eps": 1e-4}
        >>> vicreg_over(torch.ones(1, 2), torch.ones(1, 2), degrees=lambda count: count - 1, **weights, world=ALONE)
        tensor(nan)
    """
    weights = (invariance, variance, covariance, gamma, eps)
    problem = settings_problem(*weights)
    (a, b), shards = begin_views(
        "VICReg", (view1, view2), normalize=False, problem=problem, weights=weights, world=world
    )
    loss = invariance * reduce_anchors((a - b).square().mean(1), world=world)
    for z in (a, b):
        x = centered(z, shards=shards, world=world)
        cov = second_moments(x, x, world=world) / degrees(shards.total)
        deviation = (cov.diagonal() + eps).sqrt()
        loss = loss + variance / 2 * (gamma - deviation).relu().mean()
        loss = loss + covariance * off_diagonal(cov).square().sum() / len(cov)
    return loss


def settings_problem(invariance: float, variance: float, covariance: float, gamma: float, eps: float) -> str | None:
    """Return what is wrong with the settings, or None."""
    weights = {"invariance": invariance, "variance": variance, "covariance": covariance}
    return number_problem("eps must be positive", above=0, eps=eps) or number_problem(gamma=gamma, **weights)


class VICReg(Loss, function=vicreg, check=settings_problem):
    ring_refusal = SENDS_NO_ROWS
