"""Instance loss: a classifier over samples, shared by the two modalities of each sample."""

from typing import Any

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.classes import target_and_negatives
from contrastive_zoo.engine.reduction import Reduction, reduce_anchors
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.checks import labelled_problem, towers_problem
from contrastive_zoo.loss_base.class_loss import ClassLoss, begin_with_classes
from contrastive_zoo.loss_base.preparation import concat_views
from contrastive_zoo.loss_base.temperature import logit_scale
from contrastive_zoo.world import ALONE, World


@checked
def instance_loss(
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    weights: Float[Tensor, "C d"] | Float[Tensor, "C k d"],
    temperature: float | Tensor = 1.0,
    normalize: bool = False,
    sharded: bool = False,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Compute the cross-entropies of a sample's index in the training set, given its embedding in either modality.

    With x_i and y_i the embeddings of sample i, w_j the weights of sample j of the training set, and c_i the index,

        loss_i = log Σ_j exp(x_i·w_j / t)  −  x_i·w_{c_i} / t  +  log Σ_j exp(y_i·w_j / t)  −  y_i·w_{c_i} / t

    Dense: ``cross_entropy(x @ w.T / t, c) + cross_entropy(y @ w.T / t, c)``. Both modalities meet in the weights, which
    are as many as the training set has samples; ``shard_over`` splits them over the ranks.

    Args:
        x: embeddings in one modality, [n, d]; n may differ between ranks.
        y: embeddings in the other, [n, d].
        labels: c, [n], 0 … C − 1: indices of the samples in the training set, or groups of samples.
        weights: [C, d], or [C, k, d] with k centres per sample, of which the nearest counts; equal on every rank.
        temperature: t > 0; a tensor is learnable.
        normalize: normalise embeddings and weights to unit length first; the paper does not.
        sharded: whether ``weights`` are this rank's share; rows are compared with those of all ranks, in rank order.
        reduction: ``"mean"`` over all ranks' samples (nats per sample), ``"sum"``, or ``"none"`` for the local samples, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: towers that do not pair, labels that are no classes, weights of another width, or what any
            :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> eye = torch.eye(2)
        >>> instance_loss(eye, eye, torch.arange(2), weights=eye)   # twice log(e + 1) − 1
        tensor(0.6265)

    Source: Zheng et al. 2020, eqs. 4-7, https://arxiv.org/abs/1711.05535
    """
    rule, fix = "row i of x belongs to row i of y", "Pass both modalities of the same samples."
    problem = towers_problem(rule, fix, x=x, y=y) or labelled_problem(x, labels)
    rows, indices = x, labels
    if problem is None and labels is not None:
        rows, indices = concat_views((x, y), world), labels.repeat(2)
    settings: dict[str, Any] = {"temperature": temperature, "normalize": normalize, "reduction": reduction}
    z, targets, centers, shards, class_shards = begin_with_classes(
        "InstanceLoss", rows, indices, weights, problem=problem, sharded=sharded, normalize_weights=normalize,
        world=world, **settings,
    )  # fmt: skip
    factor = logit_scale(temperature, world)
    target, negatives = target_and_negatives(
        z, targets, centers, scale=factor, shards=shards, class_shards=class_shards, world=world
    )
    losses = -F.logsigmoid(factor * target - negatives)
    return reduce_anchors(losses.view(2, -1).sum(0), reduction=reduction, world=world)


class InstanceLoss(ClassLoss, function=instance_loss):
    """The parameter is ``loss.weights``; :class:`ClassLoss` documents how it is drawn, shared and sharded. Here their norms
    count, unless ``normalize=True``.

    Examples:
        >>> import torch
        >>> loss = InstanceLoss(2, 2)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)})
        >>> loss(torch.eye(2), torch.eye(2), torch.arange(2)).detach()
        tensor(0.6265)
    """
