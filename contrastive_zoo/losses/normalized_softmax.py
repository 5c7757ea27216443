"""Normalised softmax: a classifier with unit embeddings and unit class weights."""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.class_loss import ClassLoss, softmax_over_classes
from contrastive_zoo.world import ALONE, World


@checked
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
    r"""Compute the cross-entropy of a row's class over cosines; each class weight is the proxy of its class.

    With z the unit rows, w the unit weights and y the labels,

        loss_i = log Σ_j exp(z_i·w_j / t)  −  z_i·w_{y_i} / t  =  −log σ( z_i·w_{y_i} / t − log Σ_{j≠y_i} exp(z_i·w_j / t) )

    Dense: ``cross_entropy(z @ w.T / t, labels)``.

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] classes 0 … C − 1.
        weights: [C, d], or [C, k, d] with k centres per class, of which the nearest counts; equal on every rank.
        temperature: t > 0, dimensionless; a tensor is learnable.
        sharded: whether ``weights`` are this rank's share; rows are compared with the classes of all ranks, in rank order.
        reduction: ``"mean"`` over all ranks' rows (nats per row), ``"sum"``, or ``"none"`` for the local rows, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: labels that are no classes, weights of another width, or what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> normalized_softmax(torch.eye(2), torch.arange(2), weights=torch.eye(2), temperature=1.0)   # log(e + 1) − 1
        tensor(0.3133)

    Source: Zhai & Wu 2019, https://arxiv.org/abs/1811.12649
    """
    settings: Any = {"temperature": temperature, "sharded": sharded, "reduction": reduction}
    return softmax_over_classes("NormalizedSoftmax", embeddings, labels, weights, world=world, **settings)


class NormalizedSoftmax(ClassLoss, function=normalized_softmax):
    """The parameter is ``loss.weights``; :class:`ClassLoss` documents how it is drawn, shared and sharded.

    Examples:
        >>> import torch
        >>> loss = NormalizedSoftmax(2, 2, temperature=1.0)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)})
        >>> loss(torch.eye(2), torch.arange(2)).detach()   # log(e + 1) − 1
        tensor(0.3133)
    """
