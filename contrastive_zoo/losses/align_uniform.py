"""Alignment and uniformity: small distances between partners, and embeddings spread over the sphere."""

import math
from typing import Annotated

import torch  # noqa: F401 - the examples use it
from torch import Tensor
from torch.linalg import vector_norm

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.statistics import log_potentials
from contrastive_zoo.loss_base.families import TwoViewLoss
from contrastive_zoo.loss_base.settings import Bounds, Number

_RULE = "alpha is at least 1 and t positive"


class AlignUniform(TwoViewLoss):
    r"""Compute the mean distance of partners plus the log of the mean Gaussian potential of all pairs; it has no unit.

    With a, b the unit rows of the two views of all ranks,

        loss = mean_i ‖a_i − b_i‖^α  +  λ/2 Σ_{z∈{a,b}} log mean_{i≠j} exp(−t ‖z_i − z_j‖²)

    On the sphere ‖z_i − z_j‖² = 2 − 2 z_i·z_j, so the second term is a log-sum-exp of similarities, 0 without a pair.
    A zero row counts there as a point at right angles to all others.
    α = t = 2 and λ = 1 are the paper's defaults; lightly's HypersphereLoss has t = 1.

    Called as ``loss(view1, view2)``:

    - view1: a, [n, d]; n may differ between ranks.
    - view2: b, [n, d]; rows of one sample stand at the same index.

    Args:
        alpha: α ≥ 1.
        t: t > 0, an inverse squared distance.
        uniformity: λ, the second term's weight.
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: an alpha below 1, a t that is not positive, a uniformity that is not finite, or what any
            :class:`Loss` refuses.

    Examples:
        >>> AlignUniform()(torch.eye(2), torch.eye(2))   # log exp(−2 · 2)
        tensor(-4.)

    Source: Wang & Isola 2020, §4.1, https://arxiv.org/abs/2005.10242
    """

    alpha: Annotated[float, Bounds(_RULE, low=1)] = 2.0
    t: Annotated[float, Bounds(_RULE, above=0)] = 2.0
    uniformity: Number = 1.0

    supports_ring = True

    def compute(self, batch: Batch) -> Tensor:
        t, n = batch.settings.t, batch.total
        a, b = (batch.prepared(x, normalize=True) for x in batch.rows.values())
        loss = batch.reduce(vector_norm(a - b, dim=1) ** batch.settings.alpha)
        if n == 1:  # no pair
            return loss
        totals = log_potentials(batch, (a, b), 2 * t)
        return loss + batch.settings.uniformity / 2 * (totals - 2 * t - math.log(n * (n - 1))).sum()
