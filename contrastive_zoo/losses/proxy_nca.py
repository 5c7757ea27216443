"""ProxyNCA++: a row's own proxy must be the nearest, by squared distance, with low temperature."""

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.reduction import Reduction, reduce_anchors
from contrastive_zoo.losses.class_loss import ClassLoss, against_classes, positive
from contrastive_zoo.world import ALONE, World


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
    r"""Probability of choosing a row's own proxy among all proxies, by squared Euclidean distance on the sphere.

    With z the unit rows, p the unit proxies and y the labels,

        loss_i = −log [ exp(−‖z_i − p_{y_i}‖² / t) / Σ_j exp(−‖z_i − p_j‖² / t) ]

    As ‖z − p‖² = 2 − 2 z·p, this is :func:`normalized_softmax` at temperature t/2. The own proxy stands in the
    denominator, unlike in ProxyNCA. pytorch-metric-learning's ``ProxyNCALoss(softmax_scale=s)`` is ``temperature=1/s``.

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] classes 0 … C − 1.
        weights: the proxies [C, d], or k of them a class [C, k, d], of which the nearest counts; equal on every rank, or
            with ``sharded`` this rank's classes.
        temperature: t > 0, in units of squared distance; a tensor is learnt.
        sharded: ``weights`` are this rank's share; the classes of all ranks, in rank order, are compared.
        reduction: ``"mean"`` over all ranks' rows, ``"sum"``, or ``"none"`` for my rows.
        world: who else holds rows.

    Returns:
        Nats per row, the same on every rank; [n] for ``"none"``.

    Raises:
        ValueError: labels that are missing, not one per row or no classes, proxies of another width, a temperature that
            is not positive, NaN or infinite rows, ranks that bring different widths or dtypes, or no rows at all.

    Example:
        >>> import torch
        >>> eye = torch.eye(2)
        >>> proxy_nca(eye, torch.arange(2), weights=eye, temperature=2.0)   # −log(1 / (1 + e⁻¹))
        tensor(0.3133)

    Source: Teh et al. 2020, §3, https://arxiv.org/abs/2004.01113
    """
    target, others, scale = against_classes(
        "ProxyNCA", embeddings, labels, weights, temperature=temperature / 2, sharded=sharded,
        reduction=reduction, world=world,
        problem=positive("temperature", None if isinstance(temperature, Tensor) else temperature),
    )  # fmt: skip
    return reduce_anchors(-F.logsigmoid(scale * target - others), reduction=reduction, world=world)


class ProxyNCA(ClassLoss):
    """:func:`proxy_nca` with its proxies and settings kept."""

    function = staticmethod(proxy_nca)
