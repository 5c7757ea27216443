"""SIGReg: embeddings with a standard normal distribution along random directions; LeJEPA's regulariser."""

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
from contrastive_zoo.loss_base.settings import Bounds, Size, field
from contrastive_zoo.ranks import devices
from contrastive_zoo.ranks.random_keys import normal_numbers
from contrastive_zoo.ranks.row_checks import described

_MOST_POINTS = 10_000
"""Each point is a term of its own in the graph."""


class SIGReg(EmbeddingLoss):
    r"""Compute the Epps-Pulley statistic of normality, averaged over directions; embeddings are not normalised.

    With x_ij = z_i·a_j of the N rows of all ranks and the unit directions a, and φ_j(t) = 1/N Σ_i exp(√−1 t x_ij),

        loss = N mean_j ∫_{−T}^{T} |φ_j(t) − exp(−t²/2)|² exp(−t²/2) dt

    by the trapezoidal rule on equal steps. Ranks exchange 2 m numbers per point. Equal to lightly's SIGReg.
    :class:`LeJEPA` adds the distance of views.

    In training mode each call draws other directions, from the buffer ``step``: they are equal on every rank. An
    accelerator draws other ones than a CPU, without reading the step. Move the loss to the device of its embeddings. In
    evaluation mode all calls have the same directions. The buffer is part of the state dict, so that a resumed training
    draws what an uninterrupted one does.

    Called as ``loss(embeddings)``:

    - embeddings: z, [n, d], n may differ between ranks.

    Args:
        embedding_size: d.
        num_slices: m, the number of directions.
        num_points: points of the integral from 0 to T; the integrand is even.
        limit: T > 0.
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: an embedding_size or num_slices below 1, fewer than two points, a limit that is not positive; at the
            call, sizes above what memory holds, embeddings of another width or on another device, or what any
            :class:`Loss` refuses.

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
        """Return the directions of the current step, standard normal numbers.

        Raises:
            ValueError: they are more than memory holds.
        """
        sizes = {"embedding_size": int(self.embedding_size), "num_slices": int(self.num_slices)}
        return of_size(type(self).__name__, partial(_drawn, self.step, *sizes.values()), **sizes)

    def directions_problem(self, name: str, rows: Tensor) -> str | None:
        """Return why embeddings do not fit the directions, or None."""
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
