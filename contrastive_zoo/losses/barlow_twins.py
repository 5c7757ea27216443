"""Barlow Twins: the cross-correlation matrix of two views' features approaches the identity."""

from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.moments import centered, off_diagonal, second_moments, squared_sums
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.checks import number_problem
from contrastive_zoo.loss_base.loss import SENDS_NO_ROWS, Loss
from contrastive_zoo.loss_base.preparation import begin_views
from contrastive_zoo.world import ALONE, World


@checked
def barlow_twins(
    view1: Float[Tensor, "n d"],
    view2: Float[Tensor, "n d"],
    *,
    lambda_: float = 0.0051,
    eps: float = 1e-5,
    world: World = ALONE,
) -> Float[Tensor, ""]:
    r"""Compute the redundancy reduction loss; features are normalised over the batch, embeddings are not.

    With C the cross-correlation of features over the rows of all ranks, with standard deviations √(variance + ε) over N,

        loss = Σ_k (1 − C_kk)²  +  λ Σ_{k≠l} C_kl²

    ε and the divisor N are those of the authors' ``BatchNorm1d(affine=False)``; the paper has ε = 0. The authors' code
    multiplies the loss by about 0.024 for its optimiser; lightly has ``lambda_=5e-3``. The correlations of a single row
    are 0. The loss has no unit.

    Args:
        view1: [n, d]; n may differ between ranks.
        view2: [n, d]; rows of one sample stand at the same index.
        lambda_: λ ≥ 0.
        eps: ε > 0, in units of squared features.
        world: the ranks that share the batch.

    Raises:
        ValueError: an eps that is not positive, a negative lambda_, or what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> a = torch.tensor([[1.0], [-1.0]])
        >>> barlow_twins(a, -a)   # (1 + 1)²
        tensor(4.0000)

    Source: Zbontar et al. 2021, eqs. 1-2, https://arxiv.org/abs/2103.03230
    """
    problem, weights = _settings_problem(lambda_, eps), (lambda_, eps)
    views, shards = begin_views(
        "BarlowTwins", (view1, view2), normalize=False, problem=problem, weights=weights, world=world
    )
    a, b = (centered(z, shards=shards, world=world) for z in views)
    spread_a, spread_b = ((squared_sums(x, world=world) / shards.total + eps).sqrt() for x in (a, b))
    correlation = second_moments(a, b, world=world) / shards.total / spread_a[:, None] / spread_b
    return (1 - correlation.diagonal()).square().sum() + lambda_ * off_diagonal(correlation).square().sum()


def _settings_problem(lambda_: float, eps: float) -> str | None:
    return number_problem("eps must be positive", above=0, eps=eps) or number_problem(low=0, lambda_=lambda_)


class BarlowTwins(Loss, function=barlow_twins, check=_settings_problem):
    ring_refusal = SENDS_NO_ROWS
