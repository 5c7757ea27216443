"""CosFace: a normalised softmax with an additive margin on the target cosine."""

import torch  # noqa: F401 - the examples use it
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.loss_base.class_loss import ShardableClassLoss
from contrastive_zoo.loss_base.settings import Number, Positive, Reduction


class CosFace(ShardableClassLoss):
    r"""Compute the large-margin cosine loss.

    Dense: ``cross_entropy(s * (z @ w.T - m * one_hot(y)), y)``, with z the unit rows, w the unit weights, y the labels.

        loss_i = −log σ( s (z_i·w_{y_i} − m)  −  log Σ_{j≠y_i} exp(s z_i·w_j) )

    Called as ``loss(embeddings, labels)``:

    - embeddings: [n, d], n may differ between ranks.
    - labels: [n] classes 0 … C − 1.

    The parameter is ``loss.weights``, [C, d], or [C, k, d] with k centres per class, of which the nearest counts;
    :class:`ClassLoss` documents how it is drawn, shared and sharded.

    Args:
        num_classes: C.
        embedding_size: d.
        margin: m, in units of the cosine.
        scale: s > 0, dimensionless.
        reduction: ``"mean"`` over all ranks' rows (nats per row), ``"sum"``, or ``"none"`` for the local rows, [n].
        sub_centers: k.
        shard_over: the ranks that classes are split over; None keeps all weights on every rank.
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: labels that are no classes, weights of another width, a scale <= 0, a margin that is not finite, or
            what any :class:`Loss` refuses.

    Examples:
        >>> loss = CosFace(2, 2, margin=0.5, scale=2.0)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)})
        >>> loss(torch.eye(2), torch.arange(2)).detach()   # log(e + 1) − 1
        tensor(0.3133)

    Source: Wang et al. 2018, eq. 4, https://arxiv.org/abs/1801.09414
    """

    margin: Number = 0.35
    scale: Positive = 64.0
    reduction: Reduction = "mean"

    def compute(self, batch: Batch) -> Tensor:
        losses = self.pairs(batch).cross_entropies(batch.settings.scale, lambda s: s - batch.settings.margin)
        return batch.reduce(losses, reduction=self.reduction)
