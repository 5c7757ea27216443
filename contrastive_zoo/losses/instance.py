"""Instance loss: a classifier over samples, shared by the two modalities of each sample."""

import torch  # noqa: F401 - the examples use it
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.loss_base.class_loss import ShardableClassLoss
from contrastive_zoo.loss_base.inputs import Inputs
from contrastive_zoo.loss_base.settings import Reduction, Temperature
from contrastive_zoo.ranks.row_checks import labelled_problem, towers_problem


class Instance(ShardableClassLoss):
    r"""Compute the cross-entropies of a sample's index in the training set, given its embedding in either modality.

    With x_i and y_i the embeddings of sample i, w_j the weights of sample j of the training set, and c_i the index,

        loss_i = log Σ_j exp(x_i·w_j / t)  −  x_i·w_{c_i} / t  +  log Σ_j exp(y_i·w_j / t)  −  y_i·w_{c_i} / t

    Dense: ``cross_entropy(x @ w.T / t, c) + cross_entropy(y @ w.T / t, c)``. Both modalities meet in the weights, which
    are as many as the training set has samples; ``shard_over`` splits them over the ranks.

    Called as ``loss(x, y, labels)``:

    - x: embeddings in one modality, [n, d]; n may differ between ranks.
    - y: embeddings in the other, [n, d].
    - labels: c, [n], 0 … C − 1: indices of the samples in the training set, or groups of samples.

    The parameter is ``loss.weights``, [C, d], or [C, k, d] with k centres per sample, of which the nearest counts;
    :class:`ClassLoss` documents how it is drawn, shared and sharded. Here their norms count, unless ``normalize=True``.

    Args:
        num_classes: C.
        embedding_size: d.
        temperature: t > 0; a tensor or a module is learnable.
        normalize: normalise embeddings and weights to unit length first; the paper does not.
        reduction: ``"mean"`` over all ranks' samples (nats per sample), ``"sum"``, or ``"none"`` for the local samples, [n].
        sub_centers: k.
        shard_over: the ranks that samples of the training set are split over; None keeps all weights on every rank.
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: towers that do not pair, labels that are no classes, weights of another width, or what any
            :class:`Loss` refuses.

    Examples:
        >>> loss = Instance(2, 2)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)})
        >>> loss(torch.eye(2), torch.eye(2), torch.arange(2)).detach()   # twice log(e + 1) − 1
        tensor(0.6265)

    Source: Zheng et al. 2020, eqs. 4-7, https://arxiv.org/abs/1711.05535
    """

    temperature: Temperature = 1.0
    normalize: bool = False
    reduction: Reduction = "mean"

    def inputs(  # type: ignore[override]  # two modalities
        self, x: Float[Tensor, "n d"], y: Float[Tensor, "n d"], labels: Int[Tensor, " n"] | None = None
    ) -> Inputs:
        rule, fix = "row i of x belongs to row i of y", "Pass both modalities of the same samples."
        problem = towers_problem(rule, fix, x=x, y=y) or labelled_problem(x, labels)
        return self.with_weights({"x": x, "y": y, "labels": labels}, problem, x)

    def compute(self, batch: Batch) -> Tensor:
        pairs = self.pairs(batch, normalize=self.normalize, normalize_weights=self.normalize, names=("x", "y"))
        losses = pairs.cross_entropies(batch.scale(batch.settings.temperature))
        return batch.reduce(losses.view(2, -1).sum(0), reduction=self.reduction)
