"""Alignment and uniformity: partners are near, and all rows spread over the sphere."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.classes import log_sum_exp_over_ranks
from contrastive_zoo.engine.reduction import reduce_anchors
from contrastive_zoo.engine.softmax import self_log_sum_exp
from contrastive_zoo.losses.base import Loss, begin, prepared, views_problem
from contrastive_zoo.world import ALONE, World


def align_uniform(
    view1: Float[Tensor, "n d"],
    view2: Float[Tensor, "n d"],
    *,
    alpha: float = 2.0,
    t: float = 2.0,
    uniformity: float = 1.0,
    world: World = ALONE,
) -> Float[Tensor, ""]:
    r"""Mean distance of partners plus the logarithm of the mean Gaussian potential of all pairs.

    With a, b the unit rows of the two views of all ranks,

        loss = mean_i ‖a_i − b_i‖^α  +  λ/2 Σ_{z∈{a,b}} log mean_{i≠j} exp(−t ‖z_i − z_j‖²)

    On the sphere ‖z_i − z_j‖² = 2 − 2 z_i·z_j, so the second term is a log-sum-exp of similarities. Without a pair it
    is 0.

    Args:
        view1: a, [n, d]; n may differ between ranks.
        view2: b, [n, d]; rows of one sample stand at the same index.
        alpha: α ≥ 1.
        t: t > 0, an inverse squared distance.
        uniformity: λ, the second term's weight.
        world: who else holds rows.

    Returns:
        A dimensionless number, the same on every rank.

    Raises:
        ValueError: views of different shape, an alpha below 1, a t that is not positive, NaN or infinite rows, ranks
            that bring different widths or dtypes, or no rows at all.

    Example:
        >>> eye = torch.eye(2)
        >>> align_uniform(eye, eye)   # log exp(−2 · 2)
        tensor(-4.)

    Source: Wang & Isola 2020, §4.1, https://arxiv.org/abs/2005.10242
    """
    shards, *_ = begin(
        "AlignUniform",
        {"view 0": view1, "view 1": view2},
        problem=views_problem((view1, view2)) or _problem(alpha, t),
        weights=(alpha, t, uniformity),
        world=world,
    )
    views = [prepared(z, normalize=True) for z in (view1, view2)]
    loss, n = reduce_anchors((views[0] - views[1]).norm(dim=1) ** alpha, world=world), shards.total
    for z in views if n > 1 else ():
        nearness = torch.logsumexp(self_log_sum_exp(z, scale=2 * t, shards=shards, world=world), 0)
        total = log_sum_exp_over_ranks(nearness, gradient="complete", world=world)
        loss = loss + uniformity / 2 * (total - 2 * t - math.log(n * (n - 1)))
    return loss


class AlignUniform(Loss):
    """:func:`align_uniform` with its settings kept."""

    function = staticmethod(align_uniform)


def _problem(alpha: float, t: float) -> str | None:
    if not (alpha >= 1 and t > 0):
        return f"alpha is at least 1 and t positive, got alpha={alpha}, t={t}."
    return None
