"""NT-Xent: classify each view's partner among all other views of the global batch."""

import torch  # noqa: F401 - the examples use it
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.view_pairs import ViewPairs
from contrastive_zoo.loss_base.families import ViewLoss
from contrastive_zoo.loss_base.settings import Reduction, Temperature


class NTXent(ViewLoss):
    r"""Compute the normalised-temperature cross-entropy over two or more views.

    With z the unit rows of all views of all ranks and P(i) the other views of row i's sample,

        loss = mean_i [ log Σ_{k≠i} exp(z_i·z_k / t)  −  mean_{p∈P(i)} z_i·z_p / t ]

    For two views this is ``cross_entropy((z @ z.T / t).fill_diagonal_(-inf), partner)``, without the 2N × 2N matrix.
    SimCLR trains with t = 0.1 on ImageNet and 0.5 on CIFAR-10; lightly's default is 0.5.

    Called as ``loss(view1, view2, …)``: two or more of [n, d], rows of one sample at the same index; n may differ between
    ranks.

    Args:
        temperature: t > 0, dimensionless; a tensor or a module is learnable.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' anchors (nats), ``"sum"``, or ``"none"`` for the local anchors, view
            after view, [views · n].
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: fewer than two views, or what any :class:`Loss` refuses.

    Examples:
        >>> NTXent(temperature=1.0)(torch.eye(2), torch.eye(2))   # log(e + 2) − 1
        tensor(0.5514)

    Source: Chen et al. 2020, eq. 1, https://arxiv.org/abs/2002.05709
    """

    temperature: Temperature = 0.1
    normalize: bool = True
    reduction: Reduction = "mean"

    has_kernels = supports_ring = True

    def compute(self, batch: Batch) -> Tensor:
        return ViewPairs(batch, batch.settings.temperature, self.normalize).cross_entropy(self.reduction)
