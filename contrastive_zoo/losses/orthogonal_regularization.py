"""Global orthogonal regularisation: similarities of different samples with the mean and variance of random directions."""

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.collectives import sum_over_ranks
from contrastive_zoo.engine.moments import second_moments
from contrastive_zoo.engine.precision import without_autocast
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.checks import number_problem, rows_problem
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.preparation import begin, prepare_rows
from contrastive_zoo.world import ALONE, World


@checked
def orthogonal_regularization(
    embeddings: Float[Tensor, "n d"],
    *,
    mean_weight: float = 1.0,
    second_moment_weight: float = 1.0,
    world: World = ALONE,
) -> Float[Tensor, ""]:
    r"""Compute the squared mean similarity, and the excess of the mean squared similarity over 1/d.

    With M₁ and M₂ the means of z_i·z_j and (z_i·z_j)² over all i ≠ j, z the unit rows of all ranks,

        loss = λ₁ M₁²  +  λ₂ max(0, M₂ − 1/d)

    Random unit vectors have M₁ = 0 and M₂ = 1/d. The means follow from Σ z_i and Σ z_i z_iᵀ, so no pair is computed. A
    single row has no pair: both are 0. sentence-transformers' GlobalOrthogonalRegularizationLoss averages it over its
    input columns; add one of each column. The paper takes pairs of different classes, and adds it to another loss.

    Args:
        embeddings: [n, d], n may differ between ranks.
        mean_weight: λ₁.
        second_moment_weight: λ₂.
        world: the ranks that share the batch.

    Raises:
        ValueError: a weight that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
        >>> orthogonal_regularization(z)   # M₁ = M₂ = ⅓ < ½
        tensor(0.1111)

    Source: Zhang et al. 2017, https://arxiv.org/abs/1708.06320
    """
    problem = rows_problem("embeddings", embeddings) or _settings_problem(mean_weight, second_moment_weight)
    weights = (mean_weight, second_moment_weight)
    (shards,) = begin(
        "OrthogonalRegularization", {"embeddings": embeddings}, problem=problem, weights=weights, world=world
    )
    z = prepare_rows(embeddings, normalize=True, world=world)
    first, second = _sums_over_pairs(z, world)
    pairs = max(1, shards.total * (shards.total - 1))
    return (
        mean_weight * (first / pairs).square() + second_moment_weight * (second / pairs - 1 / max(1, z.shape[1])).relu()
    )


def _settings_problem(mean_weight: float, second_moment_weight: float) -> str | None:
    return number_problem(mean_weight=mean_weight, second_moment_weight=second_moment_weight)


class OrthogonalRegularization(Loss, function=orthogonal_regularization, check=_settings_problem): ...


@without_autocast
def _sums_over_pairs(z: Tensor, world: World) -> tuple[Tensor, Tensor]:
    """Return Σ_{i≠j} z_i·z_j and Σ_{i≠j} (z_i·z_j)²: squares of sums over all rows, minus the pairs i = j."""
    norms = z.square().sum(1)
    of_itself = torch.stack([norms.sum(), norms.square().sum()])
    total = sum_over_ranks(torch.cat([z.sum(0), of_itself]), gradient="complete", world=world)
    moments = second_moments(z, z, world=world)
    return total[:-2].square().sum() - total[-2], moments.square().sum() - total[-1]
