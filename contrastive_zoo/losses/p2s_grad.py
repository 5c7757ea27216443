"""P2SGrad: the squared error of cosines between rows and class weights, without margin and scale."""

from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.collectives import replicated
from contrastive_zoo.engine.precision import matmul
from contrastive_zoo.engine.reduction import Reduction, reduce_anchors
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.class_loss import ClassLoss, begin_with_classes
from contrastive_zoo.world import ALONE, World


@checked
def p2s_grad(
    embeddings: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    weights: Float[Tensor, "C d"],
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Compute the mean squared error of cosines to all C classes, whose gradient is the probability-to-similarity gradient.

    Dense: ``mse_loss(z @ w.T, one_hot(y))``, with z the unit rows, w the unit weights, y the labels.

        loss_i = 1/C Σ_j (z_i·w_j − [j = y_i])²

    The sum over classes is z_i·G z_i with G = Σ_j w_j w_jᵀ, a d × d matrix, so no N × C matrix exists. The value and the
    gradient of embeddings are those of pytorch-metric-learning's P2SGradLoss. That class overwrites its weights by
    their unit vectors at each call; here the gradient passes through their normalisation instead.

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] classes 0 … C − 1.
        weights: [C, d], equal on every rank.
        reduction: ``"mean"`` over all ranks' rows, ``"sum"``, or ``"none"`` for the local rows, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: labels that are no classes, weights of another width, or what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> p2s_grad(torch.eye(2), torch.tensor([0, 0]), weights=torch.eye(2))   # 0 and (1 + 1) / 2
        tensor(0.5000)

    Source: Zhang et al. 2019, eq. 11, https://arxiv.org/abs/1905.02479
    """
    several = f"there is one weight vector a class, got weights {list(weights.shape)}. Leave sub_centers at 1."
    problem = None if weights.ndim == 2 else several
    z, targets, centers, *_ = begin_with_classes(
        "P2SGrad",
        embeddings,
        labels,
        weights,
        problem=problem,
        reduction=reduction,
        world=world,
    )
    w = replicated(centers[:, 0], process_group=world)
    squares = (matmul(z, matmul(w.T, w)) * z).sum(1)
    own = (z * w.index_select(0, targets)).sum(1)
    return reduce_anchors((squares - 2 * own + 1) / len(w), reduction=reduction, world=world)


class P2SGrad(ClassLoss, function=p2s_grad):
    """The parameter is ``loss.weights``; :class:`ClassLoss` documents how it is drawn and shared.

    Examples:
        >>> import torch
        >>> loss = P2SGrad(2, 2)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)})
        >>> loss(torch.eye(2), torch.tensor([0, 0])).detach()
        tensor(0.5000)
    """

    refused = ("sub_centers", "shard_over")
