"""Normalised softmax: a classifier whose rows and class weights lie on the sphere."""

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.reduction import Reduction, reduce_anchors
from contrastive_zoo.losses.class_loss import ClassLoss, against_classes
from contrastive_zoo.world import ALONE, World


def normalized_softmax(
    embeddings: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    weights: Float[Tensor, "C d"] | Float[Tensor, "C k d"],
    temperature: float | Tensor = 0.05,
    sharded: bool = False,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Cross-entropy of finding a row's class by cosine; each class weight is the class's one proxy.

    With z the unit rows, w the unit weights and y the labels,

        loss_i = log Σ_j exp(z_i·w_j / t)  −  z_i·w_{y_i} / t  =  −log σ( z_i·w_{y_i} / t − log Σ_{j≠y_i} exp(z_i·w_j / t) )

    Dense: ``cross_entropy(z @ w.T / t, labels)``.

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] classes 0 … C − 1.
        weights: [C, d], or k centres a class [C, k, d], of which the nearest counts; equal on every rank, or with
            ``sharded`` this rank's classes.
        temperature: t > 0, dimensionless; a tensor is learnt.
        sharded: ``weights`` are this rank's share; the classes of all ranks, in rank order, are compared.
        reduction: ``"mean"`` over all ranks' rows, ``"sum"``, or ``"none"`` for my rows.
        world: who else holds rows.

    Returns:
        Nats per row, the same on every rank; [n] for ``"none"``.

    Raises:
        ValueError: labels that are missing, not one per row or no classes, weights of another width, a temperature that
            is not positive, NaN or infinite rows, ranks that bring different widths or dtypes, or no rows at all.

    Example:
        >>> import torch
        >>> eye = torch.eye(2)
        >>> normalized_softmax(eye, torch.arange(2), weights=eye, temperature=1.0)   # log(e + 1) − 1
        tensor(0.3133)

    Source: Zhai & Wu 2019, §3, https://arxiv.org/abs/1811.12649
    """
    target, others, scale = against_classes(
        "NormalizedSoftmax", embeddings, labels, weights, temperature=temperature, sharded=sharded,
        reduction=reduction, world=world,
    )  # fmt: skip
    return reduce_anchors(-F.logsigmoid(scale * target - others), reduction=reduction, world=world)


class NormalizedSoftmax(ClassLoss):
    """:func:`normalized_softmax` with its weights and settings kept."""

    function = staticmethod(normalized_softmax)
