"""ArcFace: a normalised softmax with an additive margin on the target angle."""

import math
from typing import Annotated

import torch
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.loss_base.class_loss import ShardableClassLoss
from contrastive_zoo.loss_base.settings import Bounds, Positive, Reduction


class ArcFace(ShardableClassLoss):
    r"""Compute the additive angular margin loss; with k centres per class, sub-center ArcFace.

    With z the unit rows, w the unit weights, y the labels and θ the angle between z_i and w_{y_i},

        loss_i = −log σ( s cos(θ + m)  −  log Σ_{j≠y_i} exp(s z_i·w_j) )

    For θ > π − m, where cos(θ + m) increases again, cos θ − m sin m replaces it, as in the authors' code.

    Called as ``loss(embeddings, labels)``:

    - embeddings: [n, d], n may differ between ranks.
    - labels: [n] classes 0 … C − 1.

    The parameter is ``loss.weights``, [C, d], or [C, k, d] with k centres per class, of which the nearest counts;
    :class:`ClassLoss` documents how it is drawn, shared and sharded. ``sub_centers=3`` is sub-center ArcFace.

    Args:
        num_classes: C.
        embedding_size: d.
        margin: m, 0 … π, in radians; pytorch-metric-learning takes degrees: its 28.6 is ``math.radians(28.6)``.
        scale: s > 0, dimensionless.
        reduction: ``"mean"`` over all ranks' rows (nats per row), ``"sum"``, or ``"none"`` for the local rows, [n].
        sub_centers: k.
        shard_over: the ranks that classes are split over; None keeps all weights on every rank.
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: labels that are no classes, weights of another width, a scale that is not positive, a margin
            outside 0 … π, or what any :class:`Loss` refuses.

    Examples:
        >>> loss = ArcFace(2, 2, margin=torch.pi / 3, scale=2.0)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)})
        >>> loss(torch.eye(2), torch.arange(2)).detach()   # log(e^(2 cos 60°) + 1) − 1
        tensor(0.3133)

    Source: Deng et al. 2019, eq. 3, https://arxiv.org/abs/1801.07698; sub-centers: Deng et al. 2020, §3,
    https://www.ecva.net/papers/eccv_2020/papers_ECCV/papers/123560715.pdf
    """

    margin: Annotated[float, Bounds("margin is an angle 0 … π in radians", low=0, high=math.pi, constant=True)] = 0.5
    scale: Positive = 64.0
    reduction: Reduction = "mean"

    def compute(self, batch: Batch) -> Tensor:
        margin = batch.settings.margin

        def shifted(cosine: Tensor) -> Tensor:
            square, eps = 1 - cosine**2, torch.finfo(cosine.dtype).eps
            sine_at_pole = square.detach().clamp(min=0).sqrt()  # the derivative is infinite at θ = 0 and π
            sine = square.clamp(min=eps).sqrt().where(square > eps, sine_at_pole)
            of_sum = cosine * math.cos(margin) - sine * math.sin(margin)
            return of_sum.where(cosine >= -math.cos(margin), cosine - margin * math.sin(margin))

        losses = self.pairs(batch).cross_entropies(batch.settings.scale, shifted)
        return batch.reduce(losses, reduction=self.reduction)
