"""CosFace: a normalised softmax whose target cosine must win by a margin."""

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.reduction import Reduction, reduce_anchors
from contrastive_zoo.losses.class_loss import ClassLoss, against_classes
from contrastive_zoo.world import ALONE, World


def cos_face(
    embeddings: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    weights: Float[Tensor, "C d"] | Float[Tensor, "C k d"],
    margin: float = 0.35,
    scale: float = 64.0,
    sharded: bool = False,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Large-margin cosine loss.

    With z the unit rows, w the unit weights and y the labels,

        loss_i = −log σ( s (z_i·w_{y_i} − m)  −  log Σ_{j≠y_i} exp(s z_i·w_j) )

    Dense: ``cross_entropy(s * (z @ w.T - m * one_hot(labels)), labels)``.

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] classes 0 … C − 1.
        weights: [C, d], or k centres a class [C, k, d], of which the nearest counts; equal on every rank, or with
            ``sharded`` this rank's classes.
        margin: m, in units of the cosine.
        scale: s > 0, dimensionless.
        sharded: ``weights`` are this rank's share; the classes of all ranks, in rank order, are compared.
        reduction: ``"mean"`` over all ranks' rows, ``"sum"``, or ``"none"`` for my rows.
        world: who else holds rows.

    Returns:
        Nats per row, the same on every rank; [n] for ``"none"``.

    Raises:
        ValueError: labels that are missing, not one per row or no classes, weights of another width, a scale that is
            not positive, NaN or infinite rows, ranks that bring different widths or dtypes, or no rows at all.

    Example:
        >>> import torch
        >>> eye = torch.eye(2)
        >>> cos_face(eye, torch.arange(2), weights=eye, margin=0.5, scale=2.0)   # log(e + 1) − 1
        tensor(0.3133)

    Source: Wang et al. 2018, eq. 4, https://arxiv.org/abs/1801.09414
    """
    target, others, _ = against_classes(
        "CosFace", embeddings, labels, weights, scale=scale, margin=margin, sharded=sharded, reduction=reduction,
        world=world,
    )  # fmt: skip
    return reduce_anchors(-F.logsigmoid(scale * (target - margin) - others), reduction=reduction, world=world)


class CosFace(ClassLoss):
    """:func:`cos_face` with its weights and settings kept."""

    function = staticmethod(cos_face)
