"""SoftTriple: a normalised softmax with several centres per class, averaged with softmax weights."""

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.precision import at_least_float32, matmul
from contrastive_zoo.loss_base.class_loss import ClassLoss
from contrastive_zoo.loss_base.settings import NonNegative, Number, Positive, Reduction, Size


class SoftTriple(ClassLoss):
    r"""Compute the cross-entropy over classes whose similarity is the softmax-weighted mean over their centres.

    With z the unit rows, w the unit centres and y the labels,

        S_ij   = Σ_k softmax_k(z_i·w_jk / γ) z_i·w_jk
        loss_i = −log σ( λ (S_{i y_i} − δ)  −  log Σ_{j≠y_i} exp(λ S_ij) )  +  τ R

    and R = Σ_j Σ_{k<l} ‖w_jk − w_jl‖ / (C K (K − 1)) over the K centres of each class, which merges redundant ones.

    Called as ``loss(embeddings, labels)``:

    - embeddings: [n, d], n may differ between ranks.
    - labels: [n] classes 0 … C − 1.

    The parameter is ``loss.weights``, centres [C, K, d], or [C, d] if K is 1; :class:`ClassLoss` documents how it is drawn
    and shared.

    Args:
        num_classes: C.
        embedding_size: d.
        la: λ > 0, dimensionless.
        gamma: γ > 0, the temperature of the softmax over centres.
        margin: δ, in units of the cosine.
        tau: τ ≥ 0; pytorch-metric-learning has no such term, ``tau=0``.
        sub_centers: K.
        reduction: ``"mean"`` over all ranks' rows (nats per row), ``"sum"``, or ``"none"`` for the local rows, [n].
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: labels that are no classes, centres of another width, a la or gamma that is not positive, a
            negative tau, or what any :class:`Loss` refuses.

    Examples:
        >>> loss = SoftTriple(2, 2, sub_centers=1, la=1.0, margin=0.0)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)})
        >>> loss(torch.eye(2), torch.arange(2)).detach()   # log(e + 1) − 1
        tensor(0.3133)

    Source: Qian et al. 2019, §3, https://arxiv.org/abs/1909.05235
    """

    la: Positive = 20.0
    gamma: Positive = 0.1
    margin: Number = 0.01
    tau: NonNegative = 0.2
    sub_centers: Size = 10
    reduction: Reduction = "mean"

    def compute(self, batch: Batch) -> Tensor:
        settings = batch.settings

        def pooling(similarity: Tensor) -> Tensor:
            return ((similarity / settings.gamma).softmax(2) * similarity).sum(2)

        losses = self.pairs(batch).cross_entropies(settings.la, lambda s: s - settings.margin, pooling)
        if settings.tau and self.weights.ndim == 3:
            losses = losses + (settings.tau * _center_distances(batch.shared(self.weights))).to(losses.dtype)
        return batch.reduce(losses, reduction=self.reduction)


def _center_distances(centers: Tensor) -> Tensor:
    """Return R of :class:`SoftTriple`; 1e-5 keeps the gradient finite where centres are equal, as in the authors' code."""
    unit, (classes, k, _) = F.normalize(at_least_float32(centers), dim=2), centers.shape
    first, second = torch.triu_indices(k, k, 1)
    cosines = matmul(unit, unit.mT)[:, first, second]
    return (2 + 1e-5 - 2 * cosines).sqrt().sum() / max(1, classes * k * (k - 1))
