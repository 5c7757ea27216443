"""Global orthogonal regularisation: similarities of different samples with the mean and variance of random directions."""

import torch
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.precision import without_autocast
from contrastive_zoo.engine.statistics import second_moments
from contrastive_zoo.loss_base.families import EmbeddingLoss
from contrastive_zoo.loss_base.settings import Number


class OrthogonalRegularization(EmbeddingLoss):
    r"""Compute the squared mean similarity, and the excess of the mean squared similarity over 1/d.

    With M₁ and M₂ the means of z_i·z_j and (z_i·z_j)² over all i ≠ j, z the unit rows of all ranks,

        loss = λ₁ M₁²  +  λ₂ max(0, M₂ − 1/d)

    Random unit vectors have M₁ = 0 and M₂ = 1/d. The means follow from Σ z_i and Σ z_i z_iᵀ, so no pair is computed. A
    single row has no pair: both are 0. sentence-transformers' GlobalOrthogonalRegularizationLoss averages it over its
    input columns; add one of each column. The paper takes pairs of different classes, and adds it to another loss.

    Called as ``loss(embeddings)``:

    - embeddings: [n, d], n may differ between ranks.

    Args:
        mean_weight: λ₁.
        second_moment_weight: λ₂.
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: a weight that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
        >>> OrthogonalRegularization()(z)   # M₁ = M₂ = ⅓ < ½
        tensor(0.1111)

    Source: Zhang et al. 2017, https://arxiv.org/abs/1708.06320
    """

    mean_weight: Number = 1.0
    second_moment_weight: Number = 1.0

    def compute(self, batch: Batch) -> Tensor:
        z = batch.prepared(batch.first, normalize=True)
        first, second = _sums_over_pairs(batch, z)
        pairs, settings = max(1, batch.total * (batch.total - 1)), batch.settings
        excess = (second / pairs - 1 / max(1, z.shape[1])).relu()
        return settings.mean_weight * (first / pairs).square() + settings.second_moment_weight * excess


@without_autocast
def _sums_over_pairs(batch: Batch, z: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ_{i≠j} z_i·z_j and Σ_{i≠j} (z_i·z_j)²: squares of sums over all rows, minus the pairs i = j."""
    norms = z.square().sum(1)
    of_itself = torch.stack([norms.sum(), norms.square().sum()])
    total = batch.sum(torch.cat([z.sum(0), of_itself]), gradient="complete")
    moments = second_moments(batch, z, z)
    return total[:-2].square().sum() - total[-2], moments.square().sum() - total[-1]
