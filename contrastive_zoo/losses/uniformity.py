"""Uniformity: partners near each other, and embeddings spread out."""

import math
from typing import Annotated

import torch
from torch import Tensor
from torch.linalg import vector_norm

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.pairwise import squared_distances
from contrastive_zoo.engine.precision import without_autocast
from contrastive_zoo.engine.rowwise import AnchorBlock, BlockLoss, reduce_rows
from contrastive_zoo.engine.statistics import log_potentials, second_moments
from contrastive_zoo.loss_base.families import EmbeddingLoss, TwoViewLoss
from contrastive_zoo.loss_base.loss import SENDS_NO_ROWS
from contrastive_zoo.loss_base.settings import Bounds, Number, Positive, Reduction

_RULE = "alpha is at least 1 and t positive"


class AlignUniform(TwoViewLoss):
    r"""Compute the mean distance of partners plus the log of the mean Gaussian potential of all pairs; it has no unit.

    Called as ``loss(view1, view2)``, [n, d] each.
    With a, b the unit rows of the two views of all ranks,

        loss = mean_i ‖a_i − b_i‖^α  +  λ/2 Σ_{z∈{a,b}} log mean_{i≠j} exp(−t ‖z_i − z_j‖²)

    On the sphere ‖z_i − z_j‖² = 2 − 2 z_i·z_j, so the second term is a log-sum-exp of similarities, 0 without a pair.
    A zero row counts there as a point at right angles to all others.
    α = t = 2 and λ = 1 are the paper's defaults; lightly's HypersphereLoss has t = 1.

    Args:
        alpha: α ≥ 1.
        t: t > 0, an inverse squared distance.
        uniformity: λ, the second term's weight.

    Examples:
        >>> AlignUniform()(torch.eye(2), torch.eye(2))   # log exp(−2 · 2)
        tensor(-4.)

    Source: Wang & Isola 2020, §4.1, https://arxiv.org/abs/2005.10242
    """

    alpha: Annotated[float, Bounds(_RULE, low=1)] = 2.0
    t: Annotated[float, Bounds(_RULE, above=0)] = 2.0
    uniformity: Number = 1.0

    supports_ring = True

    def compute(self, batch: Batch) -> Tensor:
        t, n = batch.settings.t, batch.total
        a, b = (batch.prepared(x, normalize=True) for x in batch.rows.values())
        loss = batch.reduce(vector_norm(a - b, dim=1) ** batch.settings.alpha)
        if n == 1:  # no pair
            return loss
        totals = log_potentials(batch, (a, b), 2 * t)
        return loss + batch.settings.uniformity / 2 * (totals - 2 * t - math.log(n * (n - 1))).sum()


class SpectralContrastive(TwoViewLoss):
    r"""Compute squared dot products of all other pairs minus dot products of partners, in closed form.

    Called as ``loss(view1, view2)``, [n, d] each.
    Rows with norms above √μ are scaled to √μ; then, with a, b the rows of all ranks,

        loss = −2 mean_i a_i·b_i  +  mean_{i≠j} (a_i·b_j)²

    The second sum is ⟨AᵀA, BᵀB⟩ − Σ_i (a_i·b_i)²: d × d numbers, not N × N; it is 0 without a pair. The
    loss has no unit if rows have none.

    Args:
        mu: largest squared norm; ``math.inf`` for the paper's loss, 1 in the authors' code.

    Examples:
        >>> a = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
        >>> SpectralContrastive()(a, a)   # −2 · 1 + 0.6²
        tensor(-1.6400)

    Source: HaoChen et al. 2021, §3, https://arxiv.org/abs/2106.04156
    """

    mu: Annotated[float, Bounds("mu must be positive", above=0, finite=False)] = 1.0

    ring_refusal = SENDS_NO_ROWS

    def compute(self, batch: Batch) -> Tensor:
        max_norm, n = batch.settings.mu**0.5, batch.total
        a, b = (_clip_norms(batch.prepared(x, normalize=False), max_norm) for x in batch.rows.values())
        of_pairs = (a * b).sum(1)
        all_pairs = (second_moments(batch, a, a) * second_moments(batch, b, b)).sum()
        others = all_pairs - batch.reduce(of_pairs.square(), reduction="sum")
        return -2 * batch.reduce(of_pairs) + others / max(1, n * (n - 1))


def _clip_norms(z: Tensor, max_norm: float) -> Tensor:
    return z if max_norm == torch.inf else z * (max_norm / vector_norm(z, dim=1, keepdim=True).clamp(min=max_norm))


class OrthogonalRegularization(EmbeddingLoss):
    r"""Compute the squared mean similarity, and the excess of the mean squared similarity over 1/d.

    Called as ``loss(embeddings)``, [n, d].
    With M₁ and M₂ the means of z_i·z_j and (z_i·z_j)² over all i ≠ j, z the unit rows of all ranks,

        loss = λ₁ M₁²  +  λ₂ max(0, M₂ − 1/d)

    Random unit vectors have M₁ = 0 and M₂ = 1/d. The means follow from Σ z_i and Σ z_i z_iᵀ, so no pair is computed. A
    single row has no pair: both are 0. sentence-transformers' GlobalOrthogonalRegularizationLoss averages it over its
    input columns; add one of each column. The paper takes pairs of different classes, and adds it to another loss.

    Args:
        mean_weight: λ₁.
        second_moment_weight: λ₂.

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


_ROUNDING_UNITS = 8
"""Rows that differ by fewer units of rounding count as equal."""


class KoLeo(EmbeddingLoss):
    r"""Compute minus the log of the distance to the nearest neighbour, Kozachenko & Leonenko's estimate of the entropy.

    Called as ``loss(embeddings)``, [n, d].
    With z the unit rows of all ranks,

        loss_i = −log(min_{j≠i} ‖z_i − z_j‖ + ε)

    A single row has no neighbour and no loss; of neighbours at equal distances the first gets the gradient; equal rows have
    none. It regularises another loss: DINOv2 adds 0.1 times it, on the class tokens of each large crop by itself. DINOv2
    and lightly look for the neighbour on the own process only, and add ε to each coordinate, too.

    Args:
        eps: ε > 0.

    Examples:
        >>> KoLeo()(torch.eye(3))   # −log √2
        tensor(-0.3466)

    Source: Sablayrolles et al. 2019, https://arxiv.org/abs/1806.03198
    """

    eps: Positive = 1e-8
    normalize: bool = True
    reduction: Reduction = "mean"

    def compute(self, batch: Batch) -> Tensor:
        z = batch.prepared(batch.first, normalize=self.normalize)
        loss = BlockLoss(_log_distances, eps=batch.settings.eps)
        return reduce_rows(batch, loss, z, batch.indices(), reduction=self.reduction)


def _log_distances(block: AnchorBlock, eps: float) -> tuple[Tensor, Tensor]:
    """Find the neighbour by a matmul; measure its distance by the difference, which keeps the digits of near ones."""
    anchors, candidates = block.anchors, block.candidates
    some = block.negative.any(1)
    if not candidates.shape[0]:
        return anchors.sum(1), some
    squared_distance = squared_distances(anchors.detach(), candidates.detach())
    neighbour = candidates[squared_distance.masked_fill(~block.negative, torch.inf).argmin(1)]
    squared = (anchors - neighbour).square().sum(1)
    rounding = _ROUNDING_UNITS * torch.finfo(squared.dtype).eps
    distinct = some & (squared > rounding**2 * (anchors.detach().square() + neighbour.detach().square()).sum(1))
    distance = squared.where(distinct, 1).sqrt().where(distinct, 0)
    return -(distance.where(some, 1) + eps).log(), some
