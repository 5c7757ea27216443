"""ProxyNCA++: a softmax over squared distances to proxies, with a low temperature."""

import torch  # noqa: F401 - the examples use it
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.loss_base.class_loss import ShardableClassLoss
from contrastive_zoo.loss_base.settings import Reduction, Temperature


class ProxyNCA(ShardableClassLoss):
    r"""Compute −log of the probability of a row's own proxy among all proxies, by squared distances of unit vectors.

    With z the unit rows, p the unit proxies and y the labels,

        loss_i = −log [ exp(−‖z_i − p_{y_i}‖² / t) / Σ_j exp(−‖z_i − p_j‖² / t) ]

    As ‖z − p‖² = 2 − 2 z·p, this is :class:`NormalizedSoftmax` at t/2; pytorch-metric-learning's softmax_scale is 1/t.
    The default is ProxyNCA++, with t = 1/9. The original ProxyNCA has t = 1 and leaves the own proxy out of the denominator.

    Called as ``loss(embeddings, labels)``:

    - embeddings: [n, d], n may differ between ranks.
    - labels: [n] classes 0 … C − 1.

    The parameter is ``loss.weights``, [C, d], or [C, k, d] with k proxies per class, of which the nearest counts;
    :class:`ClassLoss` documents how it is drawn, shared and sharded.

    Args:
        num_classes: C.
        embedding_size: d.
        temperature: t > 0, in units of squared distance; a tensor or a module is learnable.
        reduction: ``"mean"`` over all ranks' rows (nats per row), ``"sum"``, or ``"none"`` for the local rows, [n].
        sub_centers: k.
        shard_over: the ranks that classes are split over; None keeps all weights on every rank.
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: labels that are no classes, proxies of another width, or what any :class:`Loss` refuses.

    Examples:
        >>> loss = ProxyNCA(2, 2, temperature=2.0)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)})
        >>> loss(torch.eye(2), torch.arange(2)).detach()   # −log(1 / (1 + e⁻¹))
        tensor(0.3133)

    Source: Teh et al. 2020, §3, https://arxiv.org/abs/2004.01113
    """

    temperature: Temperature = 1 / 9
    reduction: Reduction = "mean"

    def compute(self, batch: Batch) -> Tensor:
        losses = self.pairs(batch).cross_entropies(2 * batch.scale(batch.settings.temperature))
        return batch.reduce(losses, reduction=self.reduction)
