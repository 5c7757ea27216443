"""Alignment and uniformity: small distances between partners, and embeddings spread over the sphere."""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.linalg import vector_norm

from contrastive_zoo.engine.classes import log_sum_exp_over_ranks
from contrastive_zoo.engine.reduction import reduce_anchors
from contrastive_zoo.engine.softmax import self_log_sum_exp
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.checks import is_number, number_problem
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.numbers import real
from contrastive_zoo.loss_base.preparation import begin_views
from contrastive_zoo.world import ALONE, World


@checked
def align_uniform(
    view1: Float[Tensor, "n d"],
    view2: Float[Tensor, "n d"],
    *,
    alpha: float = 2.0,
    t: float = 2.0,
    uniformity: float = 1.0,
    world: World = ALONE,
) -> Float[Tensor, ""]:
    r"""Compute the mean distance of partners plus the log of the mean Gaussian potential of all pairs; it has no unit.

    With a, b the unit rows of the two views of all ranks,

        loss = mean_i ‖a_i − b_i‖^α  +  λ/2 Σ_{z∈{a,b}} log mean_{i≠j} exp(−t ‖z_i − z_j‖²)

    On the sphere ‖z_i − z_j‖² = 2 − 2 z_i·z_j, so the second term is a log-sum-exp of similarities, 0 without a pair.
    A zero row counts there as a point at right angles to all others.
    α = t = 2 and λ = 1 are the paper's defaults; lightly's HypersphereLoss has t = 1.

    Args:
        view1: a, [n, d]; n may differ between ranks.
        view2: b, [n, d]; rows of one sample stand at the same index.
        alpha: α ≥ 1.
        t: t > 0, an inverse squared distance.
        uniformity: λ, the second term's weight.
        world: the ranks that share the batch.

    Raises:
        ValueError: an alpha below 1, a t that is not positive, a uniformity that is not finite, or what any
            :class:`Loss` refuses.

    Examples:
        >>> align_uniform(torch.eye(2), torch.eye(2))   # log exp(−2 · 2)
        tensor(-4.)

    Source: Wang & Isola 2020, §4.1, https://arxiv.org/abs/2005.10242
    """
    problem, weights = _settings_problem(alpha, t, uniformity), (alpha, t, uniformity)
    (a, b), shards = begin_views("AlignUniform", (view1, view2), problem=problem, weights=weights, world=world)
    loss, n = reduce_anchors(vector_norm(a - b, dim=1) ** alpha, world=world), shards.total
    potentials = [
        self_log_sum_exp(z, scale=2 * real(t), unit_norm=True, shards=shards, world=world)[0].logsumexp(0)
        for z in (a, b)
    ]
    total = log_sum_exp_over_ranks(torch.stack(potentials), gradient="complete", world=world)
    return loss + uniformity / 2 * (total - 2 * t - math.log(n * (n - 1))).sum() if n > 1 else loss


def _settings_problem(alpha: float, t: float, uniformity: float) -> str | None:
    if not (is_number(alpha, low=1) and is_number(t, above=0)):
        return f"alpha is at least 1 and t positive, got alpha={alpha}, t={t}."
    return number_problem(uniformity=uniformity)


class AlignUniform(Loss, function=align_uniform, check=_settings_problem):
    supports_ring = True
