"""ProxyNCA++: a softmax over squared distances to proxies, with a low temperature."""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.class_loss import ClassLoss, softmax_over_classes
from contrastive_zoo.world import ALONE, World


@checked
def proxy_nca(
    embeddings: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    weights: Float[Tensor, "C d"] | Float[Tensor, "C k d"],
    temperature: float | Tensor = 1 / 9,
    sharded: bool = False,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Compute −log of the probability of a row's own proxy among all proxies, by squared distances of unit vectors.

    With z the unit rows, p the unit proxies and y the labels,

        loss_i = −log [ exp(−‖z_i − p_{y_i}‖² / t) / Σ_j exp(−‖z_i − p_j‖² / t) ]

    As ‖z − p‖² = 2 − 2 z·p, this is :func:`normalized_softmax` at t/2; pytorch-metric-learning's softmax_scale is 1/t.
    The default is ProxyNCA++, with t = 1/9. The original ProxyNCA has t = 1 and leaves the own proxy out of the denominator.

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] classes 0 … C − 1.
        weights: [C, d], or [C, k, d] with k proxies per class, of which the nearest counts; equal on every rank.
        temperature: t > 0, in units of squared distance; a tensor is learnable.
        sharded: whether ``weights`` are this rank's share; rows are compared with the classes of all ranks, in rank order.
        reduction: ``"mean"`` over all ranks' rows (nats per row), ``"sum"``, or ``"none"`` for the local rows, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: labels that are no classes, proxies of another width, or what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> proxy_nca(torch.eye(2), torch.arange(2), weights=torch.eye(2), temperature=2.0)   # −log(1 / (1 + e⁻¹))
        tensor(0.3133)

    Source: Teh et al. 2020, §3, https://arxiv.org/abs/2004.01113
    """
    settings: Any = {"temperature": temperature, "sharded": sharded, "reduction": reduction, "world": world}
    return softmax_over_classes("ProxyNCA", embeddings, labels, weights, scale_factor=2.0, **settings)


class ProxyNCA(ClassLoss, function=proxy_nca):
    """The parameter is ``loss.weights``; :class:`ClassLoss` documents how it is drawn, shared and sharded.

    Examples:
        >>> import torch
        >>> loss = ProxyNCA(2, 2, temperature=2.0)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)})
        >>> loss(torch.eye(2), torch.arange(2)).detach()   # −log(1 / (1 + e⁻¹))
        tensor(0.3133)
    """
