"""SIGReg: embeddings with a standard normal distribution along random directions; LeJEPA adds the distance of views."""

from dataclasses import replace
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.precision import matmul, without_autocast
from contrastive_zoo.loss_base.families import EmbeddingLoss
from contrastive_zoo.loss_base.inputs import Inputs
from contrastive_zoo.loss_base.numbers import of_size
from contrastive_zoo.loss_base.settings import Bounds, Share, Size, field
from contrastive_zoo.ranks import devices
from contrastive_zoo.ranks.random_keys import normal_numbers
from contrastive_zoo.ranks.row_checks import described, views_problem

_MOST_POINTS = 10_000
"""Each point is a term of its own in the graph."""


class SIGReg(EmbeddingLoss):
    r"""Compute the Epps-Pulley statistic of normality, averaged over directions; embeddings are not normalised.

    Called as ``loss(embeddings)``, [n, d].
    With x_ij = z_i·a_j of the N rows of all ranks and the unit directions a, and φ_j(t) = 1/N Σ_i exp(√−1 t x_ij),

        loss = N mean_j ∫_{−T}^{T} |φ_j(t) − exp(−t²/2)|² exp(−t²/2) dt

    by the trapezoidal rule on equal steps. Ranks exchange 2 m numbers per point. Equal to lightly's SIGReg.
    :class:`LeJEPA` adds the distance of views.

    In training mode each call draws other directions, from the buffer ``step``: they are equal on every rank. An
    accelerator draws other ones than a CPU, without reading the step. Move the loss to the device of its embeddings. In
    evaluation mode all calls have the same directions. The buffer is part of the state dict, so that a resumed training
    draws what an uninterrupted one does.

    Args:
        embedding_size: d.
        num_slices: m, the number of directions.
        num_points: two or more points of the integral from 0 to T; the integrand is even.
        limit: T > 0.

    Raises:
        ValueError: at the call, sizes above what memory holds, or embeddings of another width or on another device.

    Examples:
        >>> loss = SIGReg(1, num_points=2, limit=100.0)
        >>> loss(torch.zeros(2, 1)), loss.step   # 2 · 100 · |0 − 1|² · 0
        (tensor(0.), tensor(1))

    Source: Balestriero & LeCun 2025, https://arxiv.org/abs/2511.08544
    """

    embedding_size: Size = field(kw_only=False)
    num_slices: Size = 1024
    num_points: Annotated[
        int, Bounds(f"num_points is an integer, 2 … {_MOST_POINTS}", low=2, high=_MOST_POINTS, whole=True)
    ] = 17
    limit: Annotated[float, Bounds(above=0, constant=True)] = 3.0

    step: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.step = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def inputs(self, embeddings: Tensor) -> Inputs:
        stated = super().inputs(embeddings)
        return replace(stated, problem=stated.problem or self.directions_problem("embeddings", embeddings))

    def compute(self, batch: Batch) -> Tensor:
        z = batch.prepared(batch.first, normalize=False)
        loss = epps_pulley(batch, z, self.directions())
        if self.training:
            self.step.add_(1)
        return loss

    def directions(self) -> Float[Tensor, "d m"]:
        """Return the directions of the current step, standard normal numbers."""
        sizes = {"embedding_size": int(self.embedding_size), "num_slices": int(self.num_slices)}
        return of_size(type(self).__name__, partial(_drawn, self.step, *sizes.values()), **sizes)

    def directions_problem(self, name: str, rows: Tensor) -> str | None:
        if rows.shape[1] != int(self.embedding_size):
            drawn = f"float32 {[int(self.embedding_size), int(self.num_slices)]}"
            return f"directions are [d, m], got {drawn} for {name} {described(rows)}."
        return devices.state_problem("directions", self.step, rows)


def epps_pulley(batch: Batch, z: Float[Tensor, "n d"], directions: Float[Tensor, "d m"]) -> Float[Tensor, ""]:
    """Return the statistic of :class:`SIGReg` from prepared rows."""
    unit = F.normalize(directions.to(z), dim=0)
    t = torch.linspace(0, batch.settings.limit, batch.settings.num_points, dtype=z.dtype, device=z.device)
    normal = (-t.square() / 2).exp()
    real, imaginary = batch.sum(_waves(matmul(z, unit), t), gradient="complete") / batch.total
    errors = (real - normal[:, None]).square() + imaginary.square()
    return 2 * batch.total * torch.trapezoid(errors.mean(1) * normal, t)


def _drawn(step: Tensor, *shape: int) -> Tensor:
    """Return normal random numbers: on a CPU a generator's, elsewhere numbers that are computed without reading the step."""
    if devices.on_cpu(step):
        return torch.randn(shape, generator=torch.Generator().manual_seed(int(step)), dtype=torch.float32, device="cpu")
    return normal_numbers(step, *shape)


@without_autocast
def _waves(x: Float[Tensor, "n m"], t: Float[Tensor, " k"]) -> Float[Tensor, "2 k m"]:
    """Return Σ_i cos(t x_i) and Σ_i sin(t x_i); the backward pass recomputes the n × m matrix of each point."""
    recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    return torch.stack([recomputed(_wave, x, point) for point in t.unbind()], 1)


def _wave(x: Tensor, point: Tensor) -> Tensor:
    angle = point * x
    return torch.stack([angle.cos().sum(0), angle.sin().sum(0)])


class LeJEPA(SIGReg):
    r"""Compute SIGReg of each view plus the distance of views from the mean of the global views.

    Called as ``loss(view1, view2, …)``, two or more of [n, d], the global ones first.
    With z_v the rows of all ranks in view v of V, of d features, and m_i the mean of sample i over the first g views,

        loss = λ mean_v SIGReg(z_v)  +  (1 − λ) mean_{v,i} ‖z_vi − m_i‖² / d

    where :class:`SIGReg` takes the same directions in each view. In training mode each call draws other directions, as
    there. Embeddings are not normalised. Equal to lightly's LeJEPALoss on all views.

    Args:
        embedding_size: d.
        lambda_: λ, 0 … 1.
        global_views: g.
        num_slices: as in :class:`SIGReg`.
        num_points: as in :class:`SIGReg`.
        limit: as in :class:`SIGReg`.

    Raises:
        ValueError: more global_views than views, or what :class:`SIGReg` refuses.

    Examples:
        >>> loss = LeJEPA(1, lambda_=0.0)
        >>> loss(torch.ones(2, 1), -torch.ones(2, 1)), loss.step   # 1² from the mean 0
        (tensor(1.), tensor(1))

    Source: Balestriero & LeCun 2025, https://arxiv.org/abs/2511.08544
    """

    lambda_: Share = 0.05
    global_views: Size = 2

    def inputs(self, *views: Float[Tensor, "n d"]) -> Inputs:
        problem, count = views_problem(views), len(views)
        if problem is None and self.global_views > count:
            problem = f"the first global_views of the views are global, got {self.global_views} of {count} views."
        problem = problem or self.directions_problem("views", views[0])
        return Inputs({f"view {index}": x for index, x in enumerate(views)}, problem)

    def compute(self, batch: Batch) -> Tensor:
        rows, share = [batch.prepared(x, normalize=False) for x in batch.rows.values()], batch.settings.lambda_
        z = torch.stack(rows, 1)
        distances = (z - z[:, : batch.settings.global_views].mean(1, keepdim=True)).square().mean((1, 2))
        directions = self.directions()
        normality = torch.stack([epps_pulley(batch, x, directions) for x in rows]).mean()
        loss = share * normality + (1 - share) * batch.reduce(distances)
        if self.training:
            self.step.add_(1)
        return loss
