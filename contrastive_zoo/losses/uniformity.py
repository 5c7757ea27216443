"""Embeddings spread out: far from each other, and near their partners."""

import math
from typing import Annotated

import torch
from torch import Tensor
from torch.linalg import vector_norm

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.cost import Blocks, Entry, Pairs, Summed
from contrastive_zoo.engine.pairwise import distances, shifted
from contrastive_zoo.engine.precision import without_autocast
from contrastive_zoo.engine.rowwise import AnchorBlock, BlockLoss, reduce_rows
from contrastive_zoo.engine.statistics import log_potentials, second_moments
from contrastive_zoo.loss_base.families import EmbeddingLoss, TwoViewLoss
from contrastive_zoo.loss_base.loss import CallInputs
from contrastive_zoo.loss_base.settings import Bounds, Constant, Number, Positive, Reduction


class AlignUniform(TwoViewLoss, engine="softmax"):
    r"""Compute the mean distance of partners plus the log of the mean Gaussian potential of all pairs; it has no unit.

    Called as ``loss(view1, view2)``, [n, d] each.
    With a, b the unit embeddings of the two views of all ranks,

        loss = mean_i ‖a_i − b_i‖^α  +  λ/2 Σ_{z∈{a,b}} log mean_{i≠j} exp(−t ‖z_i − z_j‖²)

    The second term is 0 without a pair; an embedding of zeros counts there as a point at right angles to all others.

    Args:
        alpha: α ≥ 1.
        t: t > 0, an inverse squared distance; 1 in lightly's HypersphereLoss.
        uniformity: λ, the second term's weight.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> AlignUniform()(torch.eye(2), torch.eye(2))   # log exp(−2 · 2)
        tensor(-4.)

    Source: Wang & Isola 2020, §4.1, https://arxiv.org/abs/2005.10242
    """

    compares = ("view 0",), ("view 0",)

    alpha: Annotated[float, Bounds(low=1, constant=True)] = 2.0
    t: Constant = 2.0
    uniformity: Number = 1.0

    def entries(self, stated: CallInputs) -> list[Entry]:
        t, totals = stated.settings.t, Summed(2 * stated.wide)
        scale = None if isinstance(t, Tensor) else 2 * t
        views = [Pairs([name], scale=scale, narrow=False) for name in stated.inputs.rows]
        return [*self.reduced(), *views, totals, totals]

    def compute(self, batch: Batch) -> Tensor:
        t, n = batch.settings.t, batch.total
        a, b = (batch.candidates(name, normalize=True) for name in batch.rows)
        loss = batch.reduce(vector_norm(a.local - b.local, dim=1) ** batch.settings.alpha)
        if n == 1:  # no pair
            return loss
        totals = log_potentials(batch, (a, b), 2 * t)
        return loss + batch.settings.uniformity / 2 * (totals - 2 * t - math.log(n * (n - 1))).sum()


class OrthogonalRegularization(EmbeddingLoss, engine="statistics"):
    r"""Compute the squared mean similarity, and the excess of the mean squared similarity over 1/d.

    Called as ``loss(embeddings)``, [n, d].
    With M₁ and M₂ the means of z_i·z_j and (z_i·z_j)² over all i ≠ j, z the unit embeddings of all ranks,

        loss = λ₁ M₁²  +  λ₂ max(0, M₂ − 1/d)

    Without a pair both are 0. sentence-transformers' GlobalOrthogonalRegularizationLoss is its mean over input columns.

    Args:
        mean_weight: λ₁.
        second_moment_weight: λ₂.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
        >>> OrthogonalRegularization()(z)   # M₁ = M₂ = ⅓ < ½
        tensor(0.1111)

    Source: Zhang et al. 2017, https://arxiv.org/abs/1708.06320
    """

    mean_weight: Number = 1.0
    second_moment_weight: Number = 1.0

    def entries(self, stated: CallInputs) -> list[Entry]:
        return [stated.held(4.3), Summed((stated.width + 2) * stated.wide), *stated.products()]

    def compute(self, batch: Batch) -> Tensor:
        z = batch.prepared(batch.first, normalize=True)
        first, second = _sums_over_pairs(batch, z)
        pairs, settings = max(1, batch.total * (batch.total - 1)), batch.settings
        excess = (second / pairs - 1 / max(1, z.shape[1])).relu()
        return settings.mean_weight * (first / pairs).square() + settings.second_moment_weight * excess


@without_autocast
def _sums_over_pairs(batch: Batch, z: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ_{i≠j} z_i·z_j and Σ_{i≠j} (z_i·z_j)²: squares of sums over all embeddings, minus the pairs i = j."""
    norms = z.square().sum(1)
    of_itself = torch.stack([norms.sum(), norms.square().sum()])
    total = batch.sum(torch.cat([z.sum(0), of_itself]), gradient="complete")
    moments = second_moments(batch, z, z)
    return total[:-2].square().sum() - total[-2], moments.square().sum() - total[-1]


_ROUNDING_UNITS = 8  # embeddings that differ by fewer units of rounding count as equal


class KoLeo(EmbeddingLoss, engine="rows"):
    r"""Compute minus the log of the distance to the nearest neighbour, Kozachenko & Leonenko's estimate of the entropy.

    Called as ``loss(embeddings)``, [n, d].
    With z the unit embeddings of all ranks, and G(i) the others in the group of i,

        loss_i = −log(min_{j∈G(i)} ‖z_i − z_j‖ + ε)

    With ``group_size=None`` all embeddings are one group. Otherwise the first s embeddings in rank order are the first
    group, the next s the second. The split over ranks does not change groups, and the last one may be smaller. An embedding
    that is alone does not count; of neighbours at equal distances the first gets the gradient; equal embeddings have none.

    DINOv2 adds 0.1 times the loss to its own. DINOv2 and lightly look for the neighbour on the own process only. DINOv3's
    ``KoLeoLossDistributed(loss_group_size=s)`` is ``group_size=s``.

    Args:
        eps: ε > 0.
        group_size: s, 2 or more; None looks for the neighbour among all embeddings.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' losses, ``"sum"``, or ``"none"`` for those of this rank.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> KoLeo()(torch.eye(3))   # −log √2
        tensor(-0.3466)
        >>> KoLeo(group_size=2, normalize=False)(torch.tensor([[0.0], [2.0], [3.0], [7.0]]))   # −½ (log 2 + log 4)
        tensor(-1.0397)

    Source: Sablayrolles et al. 2019, https://arxiv.org/abs/1806.03198; Siméoni et al. 2025 (DINOv3),
    https://arxiv.org/abs/2508.10104
    """

    eps: Positive = 1e-8
    group_size: Annotated[int, Bounds(low=2, whole=True)] | None = None
    normalize: bool = True
    reduction: Reduction = "mean"

    def entries(self, stated: CallInputs) -> list[Entry]:
        return [Blocks(["embeddings"], reduction=self.reduction, matmuls=1, matrices=2.75)]

    def compute(self, batch: Batch) -> Tensor:
        z = batch.candidates(next(iter(batch.rows)), normalize=self.normalize)
        loss, size = BlockLoss(_log_distances, eps=batch.settings.eps), self.group_size or batch.total
        return reduce_rows(batch, loss, z, batch.indices() // size, reduction=self.reduction)


def _log_distances(block: AnchorBlock, eps: float) -> tuple[Tensor, Tensor]:
    """Find the neighbour by a matmul; measure its distance by the difference, which keeps the digits of near ones."""
    anchors, candidates = block.anchors, block.candidates
    some = block.positive.any(1)
    points = shifted(anchors.detach(), candidates.detach())
    squared_distance = block.with_equal_columns(distances(*points, squared=True))
    neighbour = candidates[squared_distance.masked_fill(~block.positive, torch.inf).argmin(1)]
    squared = (anchors - neighbour).square().sum(1)
    rounding = _ROUNDING_UNITS * torch.finfo(squared.dtype).eps
    distinct = some & (squared > rounding**2 * (anchors.detach().square() + neighbour.detach().square()).sum(1))
    distance = squared.where(distinct, 1).sqrt().where(distinct, 0)
    return -(distance.where(some, 1) + eps).log(), some
