"""Spectral contrastive loss: large dot products of partners, small squared dot products of other pairs."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.linalg import vector_norm

from contrastive_zoo.engine.moments import second_moments
from contrastive_zoo.engine.reduction import reduce_anchors
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.checks import number_problem
from contrastive_zoo.loss_base.loss import SENDS_NO_ROWS, Loss
from contrastive_zoo.loss_base.numbers import real
from contrastive_zoo.loss_base.preparation import begin_views
from contrastive_zoo.world import ALONE, World


@checked
def spectral_contrastive(
    view1: Float[Tensor, "n d"], view2: Float[Tensor, "n d"], *, mu: float = 1.0, world: World = ALONE
) -> Float[Tensor, ""]:
    r"""Compute squared dot products of all other pairs minus dot products of partners, in closed form.

    Rows with norms above √μ are scaled to √μ; then, with a, b the rows of all ranks,

        loss = −2 mean_i a_i·b_i  +  mean_{i≠j} (a_i·b_j)²

    The second sum is ⟨AᵀA, BᵀB⟩ − Σ_i (a_i·b_i)²: d × d numbers, not N × N; it is 0 without a pair. The
    loss has no unit if rows have none.

    Args:
        view1: a, [n, d]; n may differ between ranks.
        view2: b, [n, d]; rows of one sample stand at the same index.
        mu: largest squared norm; ``math.inf`` for the paper's loss, 1 in the authors' code.
        world: the ranks that share the batch.

    Raises:
        ValueError: a mu that is not positive, or what any :class:`Loss` refuses.

    Examples:
        >>> a = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
        >>> spectral_contrastive(a, a)   # −2 · 1 + 0.6²
        tensor(-1.6400)

    Source: HaoChen et al. 2021, §3, https://arxiv.org/abs/2106.04156
    """
    views, shards = begin_views(
        "SpectralContrastive", (view1, view2), normalize=False, problem=_settings_problem(mu), mu=mu, world=world
    )
    a, b = (_clip_norms(z, real(mu) ** 0.5) for z in views)
    own, n = (a * b).sum(1), shards.total
    all_pairs = (second_moments(a, a, world=world) * second_moments(b, b, world=world)).sum()
    others = all_pairs - reduce_anchors(own.square(), reduction="sum", world=world)
    return -2 * reduce_anchors(own, world=world) + others / max(1, n * (n - 1))


def _settings_problem(mu: float) -> str | None:
    return number_problem("mu must be positive", above=0, finite=False, mu=mu)


class SpectralContrastive(Loss, function=spectral_contrastive, check=_settings_problem):
    ring_refusal = SENDS_NO_ROWS


def _clip_norms(z: Tensor, max_norm: float) -> Tensor:
    return z if max_norm == torch.inf else z * (max_norm / vector_norm(z, dim=1, keepdim=True).clamp(min=max_norm))
