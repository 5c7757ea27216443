"""CosFace: a normalised softmax with an additive margin on the target cosine."""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.checks import number_problem, positive_problem
from contrastive_zoo.loss_base.class_loss import ClassLoss, softmax_over_classes
from contrastive_zoo.world import ALONE, World


@checked
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
    r"""Compute the large-margin cosine loss.

    Dense: ``cross_entropy(s * (z @ w.T - m * one_hot(y)), y)``, with z the unit rows, w the unit weights, y the labels.

        loss_i = −log σ( s (z_i·w_{y_i} − m)  −  log Σ_{j≠y_i} exp(s z_i·w_j) )

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] classes 0 … C − 1.
        weights: [C, d], or [C, k, d] with k centres per class, of which the nearest counts; equal on every rank.
        margin: m, in units of the cosine.
        scale: s > 0, dimensionless.
        sharded: whether ``weights`` are this rank's share; rows are compared with the classes of all ranks, in rank order.
        reduction: ``"mean"`` over all ranks' rows (nats per row), ``"sum"``, or ``"none"`` for the local rows, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: labels that are no classes, weights of another width, a scale <= 0, a margin that is not finite, or
            what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> cos_face(torch.eye(2), torch.arange(2), weights=torch.eye(2), margin=0.5, scale=2.0)   # log(e + 1) − 1
        tensor(0.3133)

    Source: Wang et al. 2018, eq. 4, https://arxiv.org/abs/1801.09414
    """
    settings: Any = {"scale": scale, "margin": margin, "sharded": sharded, "reduction": reduction, "world": world}
    return softmax_over_classes(
        "CosFace", embeddings, labels, weights, target_function=lambda s: s - margin,
        problem=_settings_problem(margin, scale), **settings,
    )  # fmt: skip


def _settings_problem(margin: float, scale: float) -> str | None:
    return positive_problem(scale=scale) or number_problem(margin=margin)


class CosFace(ClassLoss, function=cos_face, check=_settings_problem):
    """The parameter is ``loss.weights``; :class:`ClassLoss` documents how it is drawn, shared and sharded.

    Examples:
        >>> import torch
        >>> loss = CosFace(2, 2, margin=0.5, scale=2.0)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)})
        >>> loss(torch.eye(2), torch.arange(2)).detach()   # log(e + 1) − 1
        tensor(0.3133)
    """
