"""FroSSL: equal views, and features of high entropy by the Frobenius norm of their second moments."""

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.collectives import sum_over_ranks
from contrastive_zoo.engine.moments import second_moments
from contrastive_zoo.engine.precision import without_autocast
from contrastive_zoo.engine.reduction import reduce_anchors
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.checks import number_problem
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.preparation import begin_views
from contrastive_zoo.world import ALONE, World


@checked
def frossl(*views: Float[Tensor, "n d"], invariance: float = 1.0, world: World = ALONE) -> Float[Tensor, ""]:
    r"""Compute the log of the squared Frobenius norm of each view's second moments plus the distance of views.

    With ẑ_v the V views, each feature divided by its norm over the rows of all ranks, d features and m = mean_v ẑ_v,

        loss = Σ_v [ log ‖ẑ_vᵀ ẑ_v / tr(ẑ_vᵀ ẑ_v)‖_F²  +  λ V/N Σ_i ‖ẑ_vi − m_i‖² ]

    The traces, which are d unless a feature is 0 everywhere, have no gradient. Equal to lightly's FroSSLLoss. The
    first term is at least −log d. Only d × d matrices exist, also for N < d. A view of zeros has no first term.

    Args:
        views: two or more views of the same samples, [n, d] each; n may differ between ranks.
        invariance: λ.
        world: the ranks that share the batch.

    Raises:
        ValueError: a weight that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> frossl(torch.eye(2), torch.eye(2))   # 2 log(½² + ½²)
        tensor(-1.3863)

    Source: Skean et al. 2024, https://arxiv.org/abs/2310.02903
    """
    rows, _ = begin_views(
        "FroSSL", views, normalize=False, problem=_settings_problem(invariance), invariance=invariance, world=world
    )
    scaled = [_divided_by_norms(z, world) for z in rows]
    center, terms = sum(scaled[1:], scaled[0]) / len(scaled), []
    for z in scaled:
        moments = second_moments(z, z, world=world)
        squares = (moments / moments.detach().trace().clamp(min=1)).square().sum()
        distance = reduce_anchors((z - center).square().sum(1), world=world)
        terms.append(squares.where(squares > 0, 1).log() + invariance * len(scaled) * distance)
    return torch.stack(terms).sum()


def _settings_problem(invariance: float) -> str | None:
    return number_problem(invariance=invariance)


class FroSSL(Loss, function=frossl, check=_settings_problem): ...


@without_autocast
def _divided_by_norms(z: Tensor, world: World) -> Tensor:
    """Return rows whose features are divided by their norms over all ranks' rows; a feature of zeros stays zero."""
    # each rank divides its local rows only, so gradients are summed over ranks
    squares = sum_over_ranks(z.square().sum(0), gradient="partial", world=world)
    return z / squares.clamp(min=_LEAST_SQUARE).sqrt()


_LEAST_SQUARE = 1e-24
"""The square of the smallest norm by which ``torch.nn.functional.normalize`` divides."""
