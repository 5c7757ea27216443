"""Barlow Twins: the cross-correlation matrix of two views' features approaches the identity."""

from typing import Annotated

import torch  # noqa: F401 - the examples use it
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.statistics import centered, off_diagonal, second_moments, squared_sums
from contrastive_zoo.loss_base.families import TwoViewLoss
from contrastive_zoo.loss_base.loss import SENDS_NO_ROWS
from contrastive_zoo.loss_base.settings import Bounds, NonNegative


class BarlowTwins(TwoViewLoss):
    r"""Compute the redundancy reduction loss; features are normalised over the batch, embeddings are not.

    With C the cross-correlation of features over the rows of all ranks, with standard deviations √(variance + ε) over N,

        loss = Σ_k (1 − C_kk)²  +  λ Σ_{k≠l} C_kl²

    ε and the divisor N are those of the authors' ``BatchNorm1d(affine=False)``; the paper has ε = 0. The authors' code
    multiplies the loss by about 0.024 for its optimiser; lightly has ``lambda_=5e-3``. The correlations of a single row
    are 0. The loss has no unit.

    Called as ``loss(view1, view2)``:

    - view1: [n, d]; n may differ between ranks.
    - view2: [n, d]; rows of one sample stand at the same index.

    Args:
        lambda_: λ ≥ 0.
        eps: ε > 0, in units of squared features.
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: an eps that is not positive, a negative lambda_, or what any :class:`Loss` refuses.

    Examples:
        >>> a = torch.tensor([[1.0], [-1.0]])
        >>> BarlowTwins()(a, -a)   # (1 + 1)²
        tensor(4.0000)

    Source: Zbontar et al. 2021, eqs. 1-2, https://arxiv.org/abs/2103.03230
    """

    lambda_: NonNegative = 0.0051
    eps: Annotated[float, Bounds("eps must be positive", above=0)] = 1e-5

    ring_refusal = SENDS_NO_ROWS

    def compute(self, batch: Batch) -> Tensor:
        a, b = (centered(batch, batch.prepared(x, normalize=False)) for x in batch.rows.values())
        spread_a, spread_b = ((squared_sums(batch, x) / batch.total + batch.settings.eps).sqrt() for x in (a, b))
        correlation = second_moments(batch, a, b) / batch.total / spread_a[:, None] / spread_b
        redundancy = off_diagonal(correlation).square().sum()
        return (1 - correlation.diagonal()).square().sum() + batch.settings.lambda_ * redundancy
