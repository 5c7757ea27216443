"""Large-margin softmax and SphereFace: a softmax whose target angle is multiplied by a whole number."""

import math
from typing import Annotated

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn import functional as F

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.precision import MIN_NORM
from contrastive_zoo.loss_base.class_loss import ClassLoss
from contrastive_zoo.loss_base.settings import Bounds, Positive, Reduction

_MOST_MARGIN = 100
"""The degree of a polynomial of the cosine, whose rounding errors grow with it; the papers' is 4 at most."""


class LargeMarginSoftmax(ClassLoss):
    r"""Compute the softmax over classes with the target logit ‖x‖ ‖w‖ ψ(θ); embeddings are not normalised.

    With θ the angle between row x_i and the weights w of its class, and m the margin,

        ψ(θ) = (−1)^k cos(m θ) − 2k   for θ in [kπ/m, (k + 1)π/m]
        loss_i = −log σ( s ‖x_i‖ ‖w_{y_i}‖ ψ(θ_i)  −  log Σ_{j≠y_i} exp(s x_i·w_j) )

    With ``normalize_weights`` all w have unit length, and the loss is SphereFace (A-Softmax). The papers mix ψ(θ) with
    cos θ and anneal the share of cos θ to 0 in training; this is the loss without that share, as
    pytorch-metric-learning's LargeMarginSoftmaxLoss and SphereFaceLoss.

    Called as ``loss(embeddings, labels)``:

    - embeddings: [n, d], n may differ between ranks.
    - labels: [n] classes 0 … C − 1.

    The parameter is ``loss.weights``, [C, d]; :class:`ClassLoss` documents how it is drawn and shared. Here norms count.

    Args:
        num_classes: C.
        embedding_size: d.
        margin: m, an integer of at least 1.
        scale: s > 0.
        normalize_weights: whether weights are normalised to unit length first.
        reduction: ``"mean"`` over all ranks' rows (nats per row), ``"sum"``, or ``"none"`` for the local rows, [n].
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: labels that are no classes, weights of another width, a margin that is no positive integer, a scale that
            is not positive, or what any :class:`Loss` refuses.

    Examples:
        >>> loss = LargeMarginSoftmax(2, 2, margin=2)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)})
        >>> loss(torch.eye(2), torch.tensor([1, 0])).detach()   # ψ(90°) = −1: log(1 + e^(1 + 1))
        tensor(2.1269)

    Source: Liu et al. 2016, eqs. 6-7, https://arxiv.org/abs/1612.02295; SphereFace: Liu et al. 2017,
    https://arxiv.org/abs/1704.08063
    """

    margin: Annotated[
        int, Bounds(f"margin is an integer, 1 … {_MOST_MARGIN}", low=1, high=_MOST_MARGIN, whole=True)
    ] = 4
    scale: Positive = 1.0
    normalize_weights: bool = False
    reduction: Reduction = "mean"

    def compute(self, batch: Batch) -> Tensor:
        scale, pairs = (
            batch.settings.scale,
            self.pairs(batch, normalize=False, normalize_weights=self.normalize_weights),
        )
        target, negatives = pairs.target_and_negatives(scale)
        of_weights = batch.shared(vector_norm(pairs.centers, dim=2)[:, 0])
        norms = vector_norm(pairs.embeddings, dim=1) * of_weights.index_select(0, pairs.targets)
        cosine = (target / norms.clamp(min=MIN_NORM)).clamp(-1, 1)
        losses = -F.logsigmoid(scale * norms * _psi(cosine, batch.settings.margin) - negatives)
        return batch.reduce(losses, reduction=self.reduction)


class SphereFace(LargeMarginSoftmax):
    """Compute :class:`LargeMarginSoftmax` with ``normalize_weights=True``, this class's default.

    Called as ``loss(embeddings, labels)``, as there.

    Args:
        num_classes: C.
        embedding_size: d.
        normalize_weights: whether weights are normalised to unit length first.
        margin: m, an integer of at least 1.
        scale: s > 0.
        reduction: ``"mean"`` over all ranks' rows (nats per row), ``"sum"``, or ``"none"`` for the local rows, [n].
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: as :class:`LargeMarginSoftmax`.

    Examples:
        >>> loss = SphereFace(2, 2, margin=2)
        >>> _ = loss.load_state_dict({"weights": 3 * torch.eye(2)})
        >>> loss(torch.eye(2), torch.tensor([1, 0])).detach()   # ψ(90°) = −1: log(1 + e^(1 + 1))
        tensor(2.1269)

    Source: Liu et al. 2017, https://arxiv.org/abs/1704.08063
    """

    normalize_weights: bool = True


def _psi(cosine: Tensor, margin: int) -> Tensor:
    """Return ψ(θ), with cos(m θ) as the Chebyshev polynomial of cos θ, whose gradient is finite at θ = 0 and π."""
    before, multiple = torch.ones_like(cosine), cosine
    for _ in range(margin - 1):
        before, multiple = multiple, 2 * cosine * multiple - before
    k = (cosine.detach().acos() * (margin / math.pi)).floor().clamp(max=margin - 1)
    return (1 - 2 * (k % 2)) * multiple - 2 * k
