"""Embeddings take a distribution, which is compared with another one along random directions."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.cost import Entry, Local, Slices, Summed
from contrastive_zoo.engine.precision import matmul
from contrastive_zoo.engine.statistics import centered, sliced_distance, waves
from contrastive_zoo.loss_base.families import of_views
from contrastive_zoo.loss_base.loss import CallInputs, Inputs, Loss
from contrastive_zoo.loss_base.settings import Bounds, Constant, Number, Share, Size, field
from contrastive_zoo.loss_base.state import Stateful
from contrastive_zoo.ranks import devices
from contrastive_zoo.ranks.random_keys import normal_numbers
from contrastive_zoo.ranks.row_checks import described


class _Sliced(Loss, Stateful, engine="slices"):
    """A loss of projections on random directions, others in each step."""

    embedding_size: Size = field(kw_only=False)
    num_slices: Size = 1024

    step: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.step = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def compute(self, batch: Batch) -> Tensor:
        z = torch.stack([batch.prepared(x, normalize=False) for x in batch.rows.values()], 1)
        loss = self.of_views(batch, z)
        if self.moves:
            self.record(None)
        return loss

    def of_views(self, batch: Batch, z: Float[Tensor, "n v d"]) -> Float[Tensor, ""]:
        return self.spread(batch, z)

    def spread(self, batch: Batch, z: Float[Tensor, "n v d"]) -> Float[Tensor, ""]:
        """Return the mean over views of how far prepared embeddings are from a distribution."""
        raise NotImplementedError(f"{type(self).__name__} must define spread(batch, z).")

    def move(self, calls: Sequence[None]) -> None:
        self.step.add_(1)

    def directions(self) -> Float[Tensor, "d m"]:
        """Return the directions of the current step, standard normal numbers."""
        return _drawn(self.step, self.embedding_size, self.num_slices)

    def directions_problem(self, name: str, rows: Tensor) -> str | None:
        if rows.shape[1] != self.embedding_size:
            drawn = f"float32 {[self.embedding_size, self.num_slices]}"
            fix = f"Construct {type(self).__name__}(embedding_size={rows.shape[1]})."
            return f"directions are [d, m], got {drawn} for {name} {described(rows)}. {fix}"
        return devices.state_problem("directions", self.step, rows)


class _Views(_Sliced):
    """A sliced loss of views, the global ones first, plus the distance of views from the mean of these."""

    lambda_: Share = 0.05
    global_views: Size = 2

    def inputs(self, *views: Float[Tensor, "n d"]) -> Inputs:
        stated, g = of_views(views), self.global_views
        problem = stated.problem
        if problem is None and g > len(views):
            problem = f"the first global_views of the views are global, got {g} of {len(views)} views."
        return replace(stated, problem=problem or self.directions_problem("views", views[0]))

    def entries(self, stated: CallInputs) -> list[Entry]:
        return [*super().entries(stated), *self.reduced()]

    def of_views(self, batch: Batch, z: Float[Tensor, "n v d"]) -> Float[Tensor, ""]:
        share = batch.settings.lambda_
        distances = (z - z[:, : batch.settings.global_views].mean(1, keepdim=True)).square().mean((1, 2))
        return share * self.spread(batch, z) + (1 - share) * batch.reduce(distances)


def _drawn(step: Tensor, *shape: int) -> Tensor:
    """Return normal random numbers: on a CPU a generator's, elsewhere numbers that are computed without reading the step."""
    if devices.on_cpu(step):
        return torch.randn(shape, generator=torch.Generator().manual_seed(int(step)), dtype=torch.float32, device="cpu")
    return normal_numbers(step, *shape)


class SIGReg(_Sliced):
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

    num_points: Annotated[int, Bounds(low=2, high=10_000, whole=True)] = 17  # each is a term of its own in the graph
    limit: Constant = 3.0

    def inputs(self, embeddings: Float[Tensor, "n d"]) -> Inputs:
        return Inputs({"embeddings": embeddings}, self.directions_problem("embeddings", embeddings))

    def entries(self, stated: CallInputs) -> list[Entry]:
        names, slices = [*stated.inputs.rows], self.num_slices
        waves = Summed(2 * self.num_points * slices * len(names) * stated.wide)
        directions, projections = Local(bytes=stated.width * slices * stated.wide), slices * stated.wide
        kept = Local(names, 4 * slices * stated.width, 2 * (stated.width * stated.wide + projections))
        return [waves, directions, kept, Local(names, bytes=projections, blocks=5)]

    def spread(self, batch: Batch, z: Float[Tensor, "n v d"]) -> Float[Tensor, ""]:
        # views share a message
        unit = F.normalize(self.directions().to(z), dim=0)
        t = torch.linspace(0, batch.settings.limit, batch.settings.num_points, dtype=z.dtype, device=z.device)
        normal = (-t.square() / 2).exp()
        projected = matmul(z.flatten(0, 1), unit).unflatten(0, z.shape[:2]).flatten(1)
        real, imaginary = batch.sum(waves(batch, projected, t), gradient="complete") / batch.total
        errors = (real - normal[:, None]).square() + imaginary.square()
        return 2 * batch.total * torch.trapezoid(errors.mean(1) * normal, t)


class LeJEPA(_Views, SIGReg):
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


class VISReg(_Views):
    r"""Compute the distance of views plus a regularisation of the location, scale and shape of embeddings.

    Called as ``loss(view1, view2, …)``, two or more of [n, d], the global ones first.
    With z_v the embeddings of all ranks in view v, of d features, means μ_vk and standard deviations σ_vk (over N), and m_i
    the mean of sample i over the first g views,

        loss = λ mean_v [ α mean_k (1 − σ_vk)²  +  β W_v²  +  γ mean_k μ_vk² ]  +  (1 − λ) mean_{v,i} ‖z_vi − m_i‖² / d

    W_v² is the mean over directions of the squared difference of the sorted projections of (z_v − μ_v) / (σ_v + ε) from the
    quantiles of the normal distribution at i / (N + 1). There σ has no gradient. A constant feature has no gradient by σ.
    Directions change as those of :class:`SIGReg` do. Equal to lightly's VISRegLoss on one process. On several, that has each
    rank's own statistics and directions.

    Args:
        embedding_size: the width of embeddings, d.
        num_slices: the number of directions.
        lambda_: λ, 0 … 1; the authors take 0.6 for small data sets.
        global_views: g.
        scale_weight: α.
        shape_weight: β.
        center_weight: γ.
        eps: ε > 0.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> loss, z = VISReg(1, lambda_=1.0), torch.tensor([[2.0]])
        >>> loss(z, z), loss.step   # (1 − 0)² + 0² + 2²
        (tensor(5.), tensor(1))

    Source: Wu et al. 2026, eqs. 1-8, https://arxiv.org/abs/2606.02572
    """

    num_slices: Size = 4096
    lambda_: Share = 0.9
    scale_weight: Number = 1.0
    shape_weight: Number = 1.0
    center_weight: Number = 1.0
    eps: Constant = 1e-4

    def entries(self, stated: CallInputs) -> list[Entry]:
        names, size = [*stated.inputs.rows], len(stated.inputs.rows) * stated.width * stated.wide
        moments = Summed(size, partial=True), Summed(2 * size)
        return [stated.held(2), *moments, Slices(names, self.num_slices), *self.reduced()]

    def spread(self, batch: Batch, z: Float[Tensor, "n v d"]) -> Float[Tensor, ""]:
        settings, flat = batch.settings, z.flatten(1)
        x = centered(batch, flat)
        moments = batch.sum(torch.stack([flat.sum(0), x.square().sum(0)]), gradient="complete") / batch.total
        mean, variance = moments.unbind()
        rounding = (8 * torch.finfo(z.dtype).eps) ** 2 * mean.detach().square()
        varies = variance > rounding
        scale = variance.where(varies, 1).sqrt().where(varies, 0)
        normal = torch.arange(1, batch.total + 1, dtype=z.dtype, device=z.device) / (batch.total + 1)
        quantiles, unit = torch.special.ndtri(normal), (x / (scale.detach() + settings.eps)).view(z.shape)
        shape = sliced_distance(batch, unit, self.directions(), lambda _: quantiles)
        loss = settings.scale_weight * (1 - scale).square().mean() + settings.shape_weight * shape
        return loss + settings.center_weight * mean.square().mean()


class RDMReg(_Sliced):
    r"""Compute the distance of two views plus that of embeddings from a sparse distribution, as Rectified LpJEPA.

    Called as ``loss(view1, view2)``, [n, d] each; an encoder ends with a ReLU.
    With a, b the embeddings of the two views of all ranks, and N targets y_ik = max(0, μ + σ e_ik), where e has a
    generalised normal distribution of variance 1, with a density proportional to exp(−|e / α|^p),

        loss = λ mean_{i,k} (a_ik − b_ik)²  +  ρ/2 Σ_{z∈{a,b}} W²(z, y)

    W² is the mean over directions and samples of the squared difference of the sorted projections of z and of y. Smaller μ
    make embeddings sparser. ``loss(z, z)`` is ρ W²(z, y). Directions and targets change as the directions of :class:`SIGReg`
    do, and are the same for both views; the authors draw other targets for each view.

    Args:
        embedding_size: the width of embeddings, d.
        num_slices: the number of directions.
        p: of e, 0.05 … 100; 1 is a Laplace distribution, 2 a normal one.
        shift: μ.
        scale: σ > 0; 1 is the authors' σ_GN.
        invariance: λ.
        regularization: ρ.
        check_finite: refuse NaN and infinite embeddings.

    Examples:
        >>> loss = RDMReg(1, shift=-1000.0, invariance=1.0, regularization=2.0)
        >>> loss(torch.ones(1, 1), torch.zeros(1, 1)), loss.step   # targets are 0: 1² + 2/2 (1² + 0²)
        (tensor(2.), tensor(1))

    Source: Kuang et al. 2026, https://arxiv.org/abs/2602.01456
    """

    num_slices: Size = 8192
    p: Annotated[float, Bounds(low=0.05, high=100, constant=True)] = 1.0
    shift: Annotated[float, Bounds(constant=True)] = 0.0
    scale: Constant = 1.0
    invariance: Number = 25.0
    regularization: Number = 125.0

    def inputs(self, view1: Float[Tensor, "n d"], view2: Float[Tensor, "n d"]) -> Inputs:
        return Inputs({"view 0": view1, "view 1": view2}, self.directions_problem("views", view1))

    def entries(self, stated: CallInputs) -> list[Entry]:
        return [Slices([*stated.inputs.rows], self.num_slices, targets=True), *self.reduced()]

    def of_views(self, batch: Batch, z: Float[Tensor, "n v d"]) -> Float[Tensor, ""]:
        settings = batch.settings
        drawn = _drawn(self.step, self.num_slices + batch.total, self.embedding_size)
        directions, normal = drawn[: self.num_slices].T, drawn[self.num_slices :].to(z)
        targets = (settings.shift + settings.scale * _generalized(normal, float(settings.p))).relu()
        loss = settings.invariance * batch.reduce((z[:, 0] - z[:, 1]).square().mean(1))
        spread = sliced_distance(batch, z, directions, lambda directions: (directions @ targets.T).sort(1).values)
        return loss + settings.regularization * spread


def _generalized(normal: Tensor, p: float) -> Tensor:
    """Return numbers with variance 1 and a density like exp(−|x / α|^p), at the quantiles of normal ones."""
    size = normal.abs() / math.sqrt(2)
    if p == 2:
        return normal
    if p == 1:
        return -normal.sign() * torch.erfc(size).log() / math.sqrt(2)
    # |x / α|^p has a gamma distribution. The logarithm of its survival function is a convex function of |x / α|^max(p, 1),
    # so Newton's method from below never passes the root, which it has to the last digit after these iterations
    q, gamma, tail = max(p, 1.0), math.gamma(1 + 1 / p), torch.erfc(size.double())
    least = gamma * torch.erf(size.double())
    y, shape = least**q, torch.full_like(tail, 1 / p)
    for _ in range(4 + math.ceil(1 / p)):
        survival = torch.special.gammaincc(shape, y ** (p / q))
        y = y + (survival / tail).log() * survival * (y ** (p / q)).exp() * gamma * q * y ** (1 - 1 / q)
    root = (y ** (1 / q)).where(y > 1e-290, least)
    return (root.copysign(normal) * math.exp((math.lgamma(1 / p) - math.lgamma(3 / p)) / 2)).to(normal)
