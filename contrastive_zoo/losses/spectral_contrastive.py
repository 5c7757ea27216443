"""Spectral contrastive loss: partners have a large dot product, any two other rows a small one in square."""

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.compiling import uncompiled
from contrastive_zoo.engine.moments import second_moments
from contrastive_zoo.engine.reduction import reduce_anchors
from contrastive_zoo.loss_base.checks import number_problem
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.numbers import real
from contrastive_zoo.loss_base.preparation import begin_views
from contrastive_zoo.world import ALONE, World


@uncompiled
def spectral_contrastive(
    view1: Float[Tensor, "n d"], view2: Float[Tensor, "n d"], *, mu: float = 1.0, world: World = ALONE
) -> Float[Tensor, ""]:
    r"""Partners' dot products against the squares of all others', in closed form.

    Rows longer than √μ are shortened to that, others are left; then, with a, b the rows of all ranks,

        loss = −2 mean_i a_i·b_i  +  mean_{i≠j} (a_i·b_j)²

    The second sum is ⟨AᵀA, BᵀB⟩ − Σ_i (a_i·b_i)²: d × d numbers, not N × N, and 0 without a pair. A number
    without a unit where rows have none.

    Args:
        view1: a, [n, d]; n may differ between ranks.
        view2: b, [n, d]; rows of one sample stand at the same index.
        mu: largest squared length; ``math.inf`` for the paper's loss, 1 in the authors' code.
        world: the ranks that share the batch.

    Raises:
        ValueError: a mu that is not positive, or what any :class:`Loss` refuses.

    Example:
        >>> a = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
        >>> spectral_contrastive(a, a)   # −2 · 1 + 0.6²
        tensor(-1.6400)

    Source: HaoChen et al. 2021, §3, https://arxiv.org/abs/2106.04156
    """
    views, shards = begin_views(
        "SpectralContrastive", (view1, view2), normalize=False, problem=_settings_problem(mu), mu=mu, world=world
    )
    a, b = (_shortened(z, real(mu) ** 0.5) for z in views)
    own, n = (a * b).sum(1), shards.total
    everybody = (second_moments(a, a, world=world) * second_moments(b, b, world=world)).sum()
    others = everybody - reduce_anchors(own.square(), reduction="sum", world=world)
    return -2 * reduce_anchors(own, world=world) + others / max(1, n * (n - 1))


def _settings_problem(mu: float) -> str | None:
    return number_problem("mu must be positive", above=0, finite=False, mu=mu)


class SpectralContrastive(Loss, function=spectral_contrastive, check=_settings_problem): ...


def _shortened(z: Tensor, longest: float) -> Tensor:
    return z if longest == torch.inf else z * (longest / z.norm(dim=1, keepdim=True).clamp(min=longest))
