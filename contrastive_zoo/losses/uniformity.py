"""Embeddings spread out: far from each other, with near partners, or with a standard normal distribution."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.linalg import vector_norm

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.cost import Blocks, Entry, Local, Pairs, Summed
from contrastive_zoo.engine.pairwise import distances
from contrastive_zoo.engine.plan import Needs
from contrastive_zoo.engine.precision import matmul, without_autocast
from contrastive_zoo.engine.rowwise import AnchorBlock, BlockLoss, reduce_rows
from contrastive_zoo.engine.statistics import log_potentials, second_moments, waves
from contrastive_zoo.engine.tiling import TILE_BYTES
from contrastive_zoo.loss_base.families import EmbeddingLoss, TwoViewLoss, of_views
from contrastive_zoo.loss_base.loss import CallInputs, Inputs
from contrastive_zoo.loss_base.settings import Bounds, Number, Positive, Reduction, Share, Size, field
from contrastive_zoo.loss_base.state import Stateful
from contrastive_zoo.ranks import devices
from contrastive_zoo.ranks.random_keys import normal_numbers
from contrastive_zoo.ranks.row_checks import described


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

    alpha: Annotated[float, Bounds(low=1)] = 2.0
    t: Positive = 2.0
    uniformity: Number = 1.0

    def needs(self, inputs: Inputs) -> Needs:
        return super().needs(inputs)._replace(anchors=("view 0",), candidates=("view 0",))

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


_GROUP = Bounds("group_size is an integer, 2 or more", low=2, whole=True)
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
    group_size: Annotated[int, _GROUP] | None = None
    normalize: bool = True
    reduction: Reduction = "mean"

    def entries(self, stated: CallInputs) -> list[Entry]:
        return [Blocks(["embeddings"], reduction=self.reduction, matmuls=1)]

    def compute(self, batch: Batch) -> Tensor:
        z = batch.candidates(next(iter(batch.rows)), normalize=self.normalize)
        loss, size = BlockLoss(_log_distances, eps=batch.settings.eps), self.group_size or batch.total
        return reduce_rows(batch, loss, z, batch.indices() // size, reduction=self.reduction)


def _log_distances(block: AnchorBlock, eps: float) -> tuple[Tensor, Tensor]:
    """Find the neighbour by a matmul; measure its distance by the difference, which keeps the digits of near ones."""
    anchors, candidates = block.anchors, block.candidates
    some = block.positive.any(1)
    if not candidates.shape[0]:
        return anchors.sum(1), some
    squared_distance = block.with_equal_columns(distances(anchors.detach(), candidates.detach(), squared=True))
    neighbour = candidates[squared_distance.masked_fill(~block.positive, torch.inf).argmin(1)]
    squared = (anchors - neighbour).square().sum(1)
    rounding = _ROUNDING_UNITS * torch.finfo(squared.dtype).eps
    distinct = some & (squared > rounding**2 * (anchors.detach().square() + neighbour.detach().square()).sum(1))
    distance = squared.where(distinct, 1).sqrt().where(distinct, 0)
    return -(distance.where(some, 1) + eps).log(), some


# each point is a term of its own in the graph
_POINTS = Bounds("num_points is an integer, 2 … 10000", low=2, high=10_000, whole=True)


class SIGReg(EmbeddingLoss, Stateful, engine="statistics"):
    r"""Compute the Epps-Pulley statistic of normality, averaged over directions; embeddings are not normalised.

    Called as ``loss(embeddings)``, [n, d].
    With x_ij = z_i·a_j of the N embeddings of all ranks and the unit directions a, and φ_j(t) = 1/N Σ_i exp(√−1 t x_ij),

        loss = N mean_j ∫_{−T}^{T} |φ_j(t) − exp(−t²/2)|² exp(−t²/2) dt

    by the trapezoidal rule on equal steps. Equal to lightly's SIGReg. :class:`LeJEPA` adds the distance of views.

    In training mode each call draws other directions, from the buffer ``step``: they are equal on every rank, and a resumed
    training draws what an uninterrupted one does. In :func:`contrastive_zoo.one_step` all calls have the same. An
    accelerator draws other ones than a CPU. Move the loss to the device of its embeddings.

    Args:
        embedding_size: the width of embeddings, d.
        num_slices: m, the number of directions.
        num_points: two or more points of the integral from 0 to T; the integrand is even.
        limit: T > 0.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> loss = SIGReg(1, num_points=2, limit=100.0)
        >>> loss(torch.zeros(2, 1)), loss.step   # 2 · 100 · |0 − 1|² · 0
        (tensor(0.), tensor(1))

    Source: Balestriero & LeCun 2025, https://arxiv.org/abs/2511.08544
    """

    embedding_size: Size = field(kw_only=False)
    num_slices: Size = 1024
    num_points: Annotated[int, _POINTS] = 17
    limit: Annotated[float, Bounds(above=0, constant=True)] = 3.0

    step: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.step = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def inputs(self, embeddings: Float[Tensor, "n d"]) -> Inputs:
        return Inputs({"embeddings": embeddings}, self.directions_problem("embeddings", embeddings))

    def entries(self, stated: CallInputs) -> list[Entry]:
        names, slices = [*stated.inputs.rows], self.num_slices
        waves = Summed(2 * self.num_points * slices * len(names) * stated.wide)
        return [waves, Local(names, 4 * slices * stated.width, 5 * slices * stated.wide), Local(bytes=2 * TILE_BYTES)]

    def compute(self, batch: Batch) -> Tensor:
        z = batch.prepared(batch.first, normalize=False)
        loss = epps_pulley(batch, z[:, None], self.directions())
        if self.training:
            self.record(None)
        return loss

    def move(self, calls: Sequence[None]) -> None:
        self.step.add_(1)

    def directions(self) -> Float[Tensor, "d m"]:
        """Return the directions of the current step, standard normal numbers."""
        return _drawn(self.step, self.embedding_size, self.num_slices)

    def directions_problem(self, name: str, rows: Tensor) -> str | None:
        if rows.shape[1] != self.embedding_size:
            drawn = f"float32 {[self.embedding_size, self.num_slices]}"
            return f"directions are [d, m], got {drawn} for {name} {described(rows)}."
        return devices.state_problem("directions", self.step, rows)


def epps_pulley(batch: Batch, z: Float[Tensor, "n v d"], directions: Float[Tensor, "d m"]) -> Float[Tensor, ""]:
    """Return the mean over views of the statistic of :class:`SIGReg`, from prepared embeddings; views share a message."""
    unit = F.normalize(directions.to(z), dim=0)
    t = torch.linspace(0, batch.settings.limit, batch.settings.num_points, dtype=z.dtype, device=z.device)
    normal = (-t.square() / 2).exp()
    projected = matmul(z.flatten(0, 1), unit).unflatten(0, z.shape[:2]).flatten(1)
    real, imaginary = batch.sum(waves(projected, t), gradient="complete") / batch.total
    errors = (real - normal[:, None]).square() + imaginary.square()
    return 2 * batch.total * torch.trapezoid(errors.mean(1) * normal, t)


def _drawn(step: Tensor, *shape: int) -> Tensor:
    """Return normal random numbers: on a CPU a generator's, elsewhere numbers that are computed without reading the step."""
    if devices.on_cpu(step):
        return torch.randn(shape, generator=torch.Generator().manual_seed(int(step)), dtype=torch.float32, device="cpu")
    return normal_numbers(step, *shape)


class LeJEPA(SIGReg):
    r"""Compute SIGReg of each view plus the distance of views from the mean of the global views.

    Called as ``loss(view1, view2, …)``, two or more of [n, d], the global ones first.
    With z_v the embeddings of all ranks in view v of V, of d features, and m_i the mean of sample i over the first g views,

        loss = λ mean_v SIGReg(z_v)  +  (1 − λ) mean_{v,i} ‖z_vi − m_i‖² / d

    where :class:`SIGReg` takes the same directions in each view. Equal to lightly's LeJEPALoss on all views.

    Args:
        embedding_size: the width of embeddings, d.
        num_slices: the number of directions of SIGReg.
        num_points: two or more points of its integral from 0 to T.
        limit: T > 0.
        lambda_: λ, 0 … 1.
        global_views: g; the other settings are those of :class:`SIGReg`.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> loss = LeJEPA(1, lambda_=0.0)
        >>> loss(torch.ones(2, 1), -torch.ones(2, 1)), loss.step   # 1² from the mean 0
        (tensor(1.), tensor(1))

    Source: Balestriero & LeCun 2025, https://arxiv.org/abs/2511.08544
    """

    lambda_: Share = 0.05
    global_views: Size = 2

    def inputs(self, *views: Float[Tensor, "n d"]) -> Inputs:
        stated = of_views(views)
        problem = stated.problem
        if problem is None and self.global_views > len(views):
            problem = f"the first global_views of the views are global, got {self.global_views} of {len(views)} views."
        return replace(stated, problem=problem or self.directions_problem("views", views[0]))

    def entries(self, stated: CallInputs) -> list[Entry]:
        return [*super().entries(stated), *self.reduced()]

    def compute(self, batch: Batch) -> Tensor:
        share = batch.settings.lambda_
        z = torch.stack([batch.prepared(x, normalize=False) for x in batch.rows.values()], 1)
        distances = (z - z[:, : batch.settings.global_views].mean(1, keepdim=True)).square().mean((1, 2))
        loss = share * epps_pulley(batch, z, self.directions()) + (1 - share) * batch.reduce(distances)
        if self.training:
            self.record(None)
        return loss
