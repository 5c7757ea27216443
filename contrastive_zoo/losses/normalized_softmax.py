"""Normalised softmax: a classifier with unit embeddings and unit class weights."""

import torch  # noqa: F401 - the examples use it
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.loss_base.class_loss import ShardableClassLoss
from contrastive_zoo.loss_base.settings import Reduction, Temperature


class NormalizedSoftmax(ShardableClassLoss):
    r"""Compute the cross-entropy of a row's class over cosines; each class weight is the proxy of its class.

    With z the unit rows, w the unit weights and y the labels,

        loss_i = log Σ_j exp(z_i·w_j / t)  −  z_i·w_{y_i} / t  =  −log σ( z_i·w_{y_i} / t − log Σ_{j≠y_i} exp(z_i·w_j / t) )

    Dense: ``cross_entropy(z @ w.T / t, labels)``.

    Called as ``loss(embeddings, labels)``:

    - embeddings: [n, d], n may differ between ranks.
    - labels: [n] classes 0 … C − 1.

    The parameter is ``loss.weights``, [C, d], or [C, k, d] with k centres per class, of which the nearest counts;
    :class:`ClassLoss` documents how it is drawn, shared and sharded.

    Args:
        num_classes: C.
        embedding_size: d.
        temperature: t > 0, dimensionless; a tensor or a module is learnable.
        reduction: ``"mean"`` over all ranks' rows (nats per row), ``"sum"``, or ``"none"`` for the local rows, [n].
        sub_centers: k.
        shard_over: the ranks that classes are split over; None keeps all weights on every rank.
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: labels that are no classes, weights of another width, or what any :class:`Loss` refuses.

    Examples:
        >>> loss = NormalizedSoftmax(2, 2, temperature=1.0)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)})
        >>> loss(torch.eye(2), torch.arange(2)).detach()   # log(e + 1) − 1
        tensor(0.3133)

    Source: Zhai & Wu 2019, https://arxiv.org/abs/1811.12649
    """

    temperature: Temperature = 0.05
    reduction: Reduction = "mean"

    def compute(self, batch: Batch) -> Tensor:
        losses = self.pairs(batch).cross_entropies(batch.scale(batch.settings.temperature))
        return batch.reduce(losses, reduction=self.reduction)
