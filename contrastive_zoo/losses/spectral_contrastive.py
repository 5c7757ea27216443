"""Spectral contrastive loss: large dot products of partners, small squared dot products of other pairs."""

from typing import Annotated

import torch
from torch import Tensor
from torch.linalg import vector_norm

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.statistics import second_moments
from contrastive_zoo.loss_base.families import TwoViewLoss
from contrastive_zoo.loss_base.loss import SENDS_NO_ROWS
from contrastive_zoo.loss_base.settings import Bounds


class SpectralContrastive(TwoViewLoss):
    r"""Compute squared dot products of all other pairs minus dot products of partners, in closed form.

    Rows with norms above √μ are scaled to √μ; then, with a, b the rows of all ranks,

        loss = −2 mean_i a_i·b_i  +  mean_{i≠j} (a_i·b_j)²

    The second sum is ⟨AᵀA, BᵀB⟩ − Σ_i (a_i·b_i)²: d × d numbers, not N × N; it is 0 without a pair. The
    loss has no unit if rows have none.

    Called as ``loss(view1, view2)``:

    - view1: a, [n, d]; n may differ between ranks.
    - view2: b, [n, d]; rows of one sample stand at the same index.

    Args:
        mu: largest squared norm; ``math.inf`` for the paper's loss, 1 in the authors' code.
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: a mu that is not positive, or what any :class:`Loss` refuses.

    Examples:
        >>> a = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
        >>> SpectralContrastive()(a, a)   # −2 · 1 + 0.6²
        tensor(-1.6400)

    Source: HaoChen et al. 2021, §3, https://arxiv.org/abs/2106.04156
    """

    mu: Annotated[float, Bounds("mu must be positive", above=0, finite=False)] = 1.0

    ring_refusal = SENDS_NO_ROWS

    def compute(self, batch: Batch) -> Tensor:
        max_norm, n = batch.settings.mu**0.5, batch.total
        a, b = (_clip_norms(batch.prepared(x, normalize=False), max_norm) for x in batch.rows.values())
        own = (a * b).sum(1)
        all_pairs = (second_moments(batch, a, a) * second_moments(batch, b, b)).sum()
        others = all_pairs - batch.reduce(own.square(), reduction="sum")
        return -2 * batch.reduce(own) + others / max(1, n * (n - 1))


def _clip_norms(z: Tensor, max_norm: float) -> Tensor:
    return z if max_norm == torch.inf else z * (max_norm / vector_norm(z, dim=1, keepdim=True).clamp(min=max_norm))
