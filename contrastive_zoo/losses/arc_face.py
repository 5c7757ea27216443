"""ArcFace: a normalised softmax whose target angle must win by a margin."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.reduction import Reduction, reduce_anchors
from contrastive_zoo.losses.class_loss import ClassLoss, against_classes
from contrastive_zoo.world import ALONE, World


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
    r"""Additive angular margin loss; with k centres a class, sub-center ArcFace.

    With z the unit rows, w the unit weights, y the labels and θ the angle between z_i and w_{y_i},

        loss_i = −log σ( s cos(θ + m)  −  log Σ_{j≠y_i} exp(s z_i·w_j) )

    For θ > π − m, where cos(θ + m) would rise again, it is cos θ − m sin m, as in the authors' code.

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] classes 0 … C − 1.
        weights: [C, d], or k centres a class [C, k, d], of which the nearest counts; equal on every rank, or with
            ``sharded`` this rank's classes.
        margin: m, 0 … π, in radians; pytorch-metric-learning counts it in degrees, its 28.6 is ``math.radians(28.6)``.
        scale: s > 0, dimensionless.
        sharded: ``weights`` are this rank's share; the classes of all ranks, in rank order, are compared.
        reduction: ``"mean"`` over all ranks' rows, ``"sum"``, or ``"none"`` for my rows.
        world: who else holds rows.

    Returns:
        Nats per row, the same on every rank; [n] for ``"none"``.

    Raises:
        ValueError: labels that are missing, not one per row or no classes, weights of another width, a scale that is
            not positive, a margin outside 0 … π, NaN or infinite rows, ranks that bring different widths or dtypes, or
            no rows at all.

    Example:
        >>> eye = torch.eye(2)
        >>> arc_face(eye, torch.arange(2), weights=eye, margin=torch.pi / 3, scale=2.0)   # log(e^(2 cos 60°) + 1) − 1
        tensor(0.3133)

    Source: Deng et al. 2019, eq. 3, https://arxiv.org/abs/1801.07698; sub-centers: Deng et al. 2020, §3,
    https://www.ecva.net/papers/eccv_2020/papers_ECCV/papers/123560715.pdf
    """
    problem = None if 0 <= margin <= math.pi else f"margin is an angle 0 … π in radians, got {margin}."
    target, others, _ = against_classes(
        "ArcFace", embeddings, labels, weights, scale=scale, margin=margin, sharded=sharded, reduction=reduction,
        problem=problem, world=world,
    )  # fmt: skip
    square, eps = 1 - target**2, torch.finfo(target.dtype).eps
    at_pole = square.detach().clamp(min=0).sqrt()  # the slope would be infinite at θ = 0 and π
    sine = square.clamp(min=eps).sqrt().where(square > eps, at_pole)
    moved = target * math.cos(margin) - sine * math.sin(margin)
    moved = moved.where(target >= -math.cos(margin), target - margin * math.sin(margin))
    return reduce_anchors(-F.logsigmoid(scale * moved - others), reduction=reduction, world=world)


class ArcFace(ClassLoss):
    """:func:`arc_face` with its weights and settings kept; ``sub_centers=3`` is sub-center ArcFace."""

    function = staticmethod(arc_face)
