"""ArcFace: a normalised softmax with an additive margin on the target angle."""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.checks import number_problem, positive_problem
from contrastive_zoo.loss_base.class_loss import ClassLoss, softmax_over_classes
from contrastive_zoo.world import ALONE, World


@checked
def arc_face(
    embeddings: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    weights: Float[Tensor, "C d"] | Float[Tensor, "C k d"],
    margin: float = 0.5,
    scale: float = 64.0,
    sharded: bool = False,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Compute the additive angular margin loss; with k centres per class, sub-center ArcFace.

    With z the unit rows, w the unit weights, y the labels and θ the angle between z_i and w_{y_i},

        loss_i = −log σ( s cos(θ + m)  −  log Σ_{j≠y_i} exp(s z_i·w_j) )

    For θ > π − m, where cos(θ + m) increases again, cos θ − m sin m replaces it, as in the authors' code.

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] classes 0 … C − 1.
        weights: [C, d], or [C, k, d] with k centres per class, of which the nearest counts; equal on every rank.
        margin: m, 0 … π, in radians; pytorch-metric-learning takes degrees: its 28.6 is ``math.radians(28.6)``.
        scale: s > 0, dimensionless.
        sharded: whether ``weights`` are this rank's share; rows are compared with the classes of all ranks, in rank order.
        reduction: ``"mean"`` over all ranks' rows (nats per row), ``"sum"``, or ``"none"`` for the local rows, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: labels that are no classes, weights of another width, a scale that is not positive, a margin
            outside 0 … π, or what any :class:`Loss` refuses.

    Examples:
        >>> eye = torch.eye(2)
        >>> arc_face(eye, torch.arange(2), weights=eye, margin=torch.pi / 3, scale=2.0)   # log(e^(2 cos 60°) + 1) − 1
        tensor(0.3133)

    Source: Deng et al. 2019, eq. 3, https://arxiv.org/abs/1801.07698; sub-centers: Deng et al. 2020, §3,
    https://www.ecva.net/papers/eccv_2020/papers_ECCV/papers/123560715.pdf
    """
    settings: Any = {"scale": scale, "margin": margin, "sharded": sharded, "reduction": reduction, "world": world}

    def target_logit(cosine: Tensor) -> Tensor:
        square, eps = 1 - cosine**2, torch.finfo(cosine.dtype).eps
        sine_at_pole = square.detach().clamp(min=0).sqrt()  # the derivative is infinite at θ = 0 and π
        sine = square.clamp(min=eps).sqrt().where(square > eps, sine_at_pole)
        shifted = cosine * math.cos(margin) - sine * math.sin(margin)
        return shifted.where(cosine >= -math.cos(margin), cosine - margin * math.sin(margin))

    return softmax_over_classes(
        "ArcFace",
        embeddings,
        labels,
        weights,
        target_function=target_logit,
        problem=_settings_problem(margin, scale),
        **settings,
    )


def _settings_problem(margin: float, scale: float) -> str | None:
    rule = "margin is an angle 0 … π in radians"
    return number_problem(rule, low=0, high=math.pi, margin=margin) or positive_problem(scale=scale)


class ArcFace(ClassLoss, function=arc_face, check=_settings_problem):
    """The parameter is ``loss.weights``; :class:`ClassLoss` documents how it is drawn, shared and sharded.
    ``sub_centers=3`` is sub-center ArcFace.

    Examples:
        >>> loss = ArcFace(2, 2, margin=torch.pi / 3, scale=2.0)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)})
        >>> loss(torch.eye(2), torch.arange(2)).detach()   # log(e^(2 cos 60°) + 1) − 1
        tensor(0.3133)
    """
