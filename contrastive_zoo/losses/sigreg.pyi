# Written by tools/stubs.py from the module beside it: `make stubs`.
from collections.abc import Mapping
from typing import Any

from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.loss_base.class_loss import ConstructingLoss
from contrastive_zoo.world import ALONE, Shards, World

def sigreg(
    embeddings: Float[Tensor, "n d"],
    *,
    directions: Float[Tensor, "d m"],
    num_points: int = 17,
    limit: float = 3.0,
    world: World = ALONE,
) -> Float[Tensor, ""]:
    """Compute the Epps-Pulley statistic of normality, averaged over directions; embeddings are not normalised.

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

def points_problem(num_points: int) -> str | None:
    """Return what is wrong with a number of points of an integral, or None. Each is a term of its own in the graph."""

class SIGReg(ConstructingLoss):
    """Compute the Epps-Pulley statistic of normality, averaged over directions; embeddings are not normalised.

    With x_ij = z_i·a_j of the N rows of all ranks and the unit directions a, and φ_j(t) = 1/N Σ_i exp(√−1 t x_ij),

        loss = N mean_j ∫_{−T}^{T} |φ_j(t) − exp(−t²/2)|² exp(−t²/2) dt

    by the trapezoidal rule on equal steps. Ranks exchange 2 m numbers per point. Equal to lightly's SIGReg.
    :class:`LeJEPA` adds the distance of views.

    In training mode each call draws other directions, from the buffer ``step``: they are equal on every rank.

    An accelerator draws other ones than a CPU, without reading the step. Move the loss to the device of its embeddings.

    In evaluation mode all calls have the same directions. The buffer is part of the state dict, so that a resumed
    training draws what an uninterrupted one does.

    Called as ``loss(embeddings)``:

    - embeddings: z, [n, d], n may differ between ranks.

    Args:
        embedding_size: d.
        num_slices: m, the number of directions.
        num_points: points of the integral from 0 to T; the integrand is even.
        limit: T > 0.
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: an embedding_size or num_slices below 1; at the call, one above what memory holds.
        ValueError: directions of another width or on another device, fewer than two points, a limit that is not positive,
            or what any :class:`Loss` refuses.

    Examples:
        >>> loss = SIGReg(2, num_slices=64)
        >>> value = loss(torch.zeros(9, 2))
        >>> loss.step
        tensor(1)

    Source: Balestriero & LeCun 2025, https://arxiv.org/abs/2511.08544
    """

    embedding_size: int
    num_slices: int
    num_points: int
    limit: float
    check_finite: bool
    step: Tensor

    def __init__(
        self,
        embedding_size: int,
        *,
        num_slices: int = 1024,
        num_points: int = 17,
        limit: float = 3.0,
        check_finite: bool = True,
    ) -> None: ...
    def __call__(self, embeddings: Float[Tensor, "n d"], *, world: World | None = None) -> Tensor: ...
    def settings_problem(self) -> str | None: ...
    def settings(self) -> Mapping[str, Any]:
        """Return the current settings, with the directions of the current step."""
