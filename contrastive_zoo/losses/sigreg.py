"""SIGReg: embeddings with a standard normal distribution along random directions; LeJEPA's regulariser."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from contrastive_zoo import devices
from contrastive_zoo.collectives import sum_over_ranks
from contrastive_zoo.compiling import traced_as
from contrastive_zoo.device_normals import normal_numbers
from contrastive_zoo.engine.precision import matmul, without_autocast
from contrastive_zoo.handshake import kind
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.checks import number_problem, positive_problem, rows_problem
from contrastive_zoo.loss_base.class_loss import ConstructingLoss
from contrastive_zoo.loss_base.graph_operator import GraphModule
from contrastive_zoo.loss_base.preparation import begin, prepare_rows
from contrastive_zoo.session import refuse
from contrastive_zoo.sizes import of_size
from contrastive_zoo.world import ALONE, Shards, World


@checked
def sigreg(
    embeddings: Float[Tensor, "n d"],
    *,
    directions: Float[Tensor, "d m"],
    num_points: int = 17,
    limit: float = 3.0,
    world: World = ALONE,
) -> Float[Tensor, ""]:
    r"""Compute the Epps-Pulley statistic of normality, averaged over directions; embeddings are not normalised.

    With x_ij = z_i·a_j of the N rows of all ranks and the unit directions a, and φ_j(t) = 1/N Σ_i exp(√−1 t x_ij),

        loss = N mean_j ∫_{−T}^{T} |φ_j(t) − exp(−t²/2)|² exp(−t²/2) dt

    by the trapezoidal rule on equal steps. Ranks exchange 2 m numbers per point. Equal to lightly's SIGReg.
    :class:`LeJEPA` adds the distance of views.

    Args:
        embeddings: z, [n, d], n may differ between ranks.
        directions: a, [d, m], equal on every rank; :class:`SIGReg` draws them.
        num_points: points of the integral from 0 to T; the integrand is even.
        limit: T > 0.
        world: the ranks that share the batch.

    Raises:
        ValueError: directions of another width or on another device, fewer than two points, a limit that is not positive,
            or what any :class:`Loss` refuses.

    Examples:
        >>> sigreg(torch.zeros(2, 1), directions=torch.ones(1, 1), num_points=2, limit=100.0)   # 2 · 100 · |0 − 1|² · 0
        tensor(0.)

    Source: Balestriero & LeCun 2025, https://arxiv.org/abs/2511.08544
    """
    problem = rows_problem("embeddings", embeddings) or _settings_problem(num_points, limit)
    if problem is None and (directions.ndim != 2 or len(directions) != embeddings.shape[1]):
        problem = f"directions are [d, m], got {kind(directions)} for embeddings {kind(embeddings)}."
    problem = problem or devices.state_problem("directions", directions, embeddings)
    settings: Any = {"directions": list(directions.shape), "num_points": num_points, "limit": limit}
    (shards,) = begin("SIGReg", {"embeddings": embeddings}, problem=problem, world=world, **settings)
    z = prepare_rows(embeddings, normalize=False, world=world)
    return epps_pulley(z, directions, num_points=num_points, limit=limit, shards=shards, world=world)


def epps_pulley(
    z: Float[Tensor, "n d"],
    directions: Float[Tensor, "d m"],
    *,
    num_points: int,
    limit: float,
    shards: Shards,
    world: World,
) -> Float[Tensor, ""]:
    """Return the statistic of :func:`sigreg` from prepared rows, without checks or handshake."""
    unit = nn.functional.normalize(directions.to(z), dim=0)
    t = torch.linspace(0, limit, num_points, dtype=z.dtype, device=z.device)
    normal = (-t.square() / 2).exp()
    real, imaginary = sum_over_ranks(_waves(matmul(z, unit), t), gradient="complete", world=world) / shards.total
    errors = (real - normal[:, None]).square() + imaginary.square()
    return 2 * shards.total * torch.trapezoid(errors.mean(1) * normal, t)


def _settings_problem(num_points: int, limit: float) -> str | None:
    return points_problem(num_points) or positive_problem(limit=limit)


def points_problem(num_points: int) -> str | None:
    """Return what is wrong with a number of points of an integral, or None. Each is a term of its own in the graph."""
    rule = f"num_points is an integer, 2 … {_MOST_POINTS}"
    return number_problem(rule, low=2, high=_MOST_POINTS, whole=True, num_points=num_points)


_MOST_POINTS = 10_000


class SIGReg(ConstructingLoss, function=sigreg, check=_settings_problem):
    """In training mode each call draws other directions, from the buffer ``step``: they are equal on every rank.

    An accelerator draws other ones than a CPU, without reading the step. Move the loss to the device of its embeddings.

    In evaluation mode all calls have the same directions. The buffer is part of the state dict, so that a resumed
    training draws what an uninterrupted one does.

    Args:
        embedding_size: d.
        num_slices: m, the number of directions.

    Raises:
        ValueError: an embedding_size or num_slices below 1; at the call, one above what memory holds.

    Examples:
        >>> loss = SIGReg(2, num_slices=64)
        >>> value = loss(torch.zeros(9, 2))
        >>> loss.step
        tensor(1)
    """

    made = ("directions",)
    step: Tensor

    def __init__(self, embedding_size: int, *, num_slices: int = 1024, **settings: Any) -> None:
        super().__init__(directions=None, **settings)
        self.embedding_size, self.num_slices = embedding_size, num_slices
        if problem := self._size_problem():
            raise ValueError(f"{type(self).__name__}: {problem}")
        self.step = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def settings_problem(self) -> str | None:
        return super().settings_problem() or (self._size_problem() if hasattr(self, "num_slices") else None)

    def _size_problem(self) -> str | None:
        return number_problem(low=1, whole=True, embedding_size=self.embedding_size, num_slices=self.num_slices)

    def settings(self) -> Mapping[str, Any]:
        """Return the current settings, with the directions of the current step."""
        sizes = {"embedding_size": int(self.embedding_size), "num_slices": int(self.num_slices)}
        draw = partial(_drawn, self.step, *sizes.values())
        return {**super().settings(), "directions": of_size(type(self).__name__, draw, **sizes)}

    @traced_as(GraphModule.traced_forward)
    def forward(self, *rows: Tensor, world: World | None = None, **named_rows: Tensor) -> Tensor:
        """Return the loss, and count the step.

        Args:
            rows: positional arguments of the function.
            world: the ranks that share the batch; None is this rank alone. ``DistributedLoss`` passes its own.
            named_rows: the same arguments by name.
        """
        world = self.local() if world is None else world
        if problem := self._size_problem():
            refuse(type(self).__name__, problem, world=world)
        loss = super().forward(*rows, world=world, **named_rows)
        if self.training:
            self.step.add_(1)
        return loss


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
