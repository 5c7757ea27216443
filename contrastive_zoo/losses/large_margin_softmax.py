"""Large-margin softmax and SphereFace: a softmax whose target angle is multiplied by a whole number."""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn import functional as F

from contrastive_zoo.collectives import replicated
from contrastive_zoo.engine.classes import target_and_negatives
from contrastive_zoo.engine.reduction import Reduction, reduce_anchors
from contrastive_zoo.engine.unit_rows import MIN_NORM
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.checks import number_problem, positive_problem
from contrastive_zoo.loss_base.class_loss import ClassLoss, begin_with_classes
from contrastive_zoo.loss_base.numbers import real
from contrastive_zoo.world import ALONE, World


@checked
def large_margin_softmax(
    embeddings: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    weights: Float[Tensor, "C d"],
    margin: int = 4,
    scale: float = 1.0,
    normalize_weights: bool = False,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Compute the softmax over classes with the target logit ‖x‖ ‖w‖ ψ(θ); embeddings are not normalised.

    With θ the angle between row x_i and the weights w of its class, and m the margin,

        ψ(θ) = (−1)^k cos(m θ) − 2k   for θ in [kπ/m, (k + 1)π/m]
        loss_i = −log σ( s ‖x_i‖ ‖w_{y_i}‖ ψ(θ_i)  −  log Σ_{j≠y_i} exp(s x_i·w_j) )

    With ``normalize_weights`` all w have unit length, and the loss is SphereFace (A-Softmax). The papers mix ψ(θ) with
    cos θ and anneal the share of cos θ to 0 in training; this is the loss without that share, as
    pytorch-metric-learning's LargeMarginSoftmaxLoss and SphereFaceLoss.

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] classes 0 … C − 1.
        weights: [C, d], equal on every rank.
        margin: m, an integer of at least 1.
        scale: s > 0.
        normalize_weights: whether weights are normalised to unit length first.
        reduction: ``"mean"`` over all ranks' rows (nats per row), ``"sum"``, or ``"none"`` for the local rows, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: labels that are no classes, weights of another width, a margin that is no positive integer, a scale that
            is not positive, or what any :class:`Loss` refuses.

    Examples:
        >>> eye = torch.eye(2)
        >>> large_margin_softmax(eye, torch.tensor([1, 0]), weights=eye, margin=2)   # ψ(90°) = −1: log(1 + e^(1 + 1))
        tensor(2.1269)

    Source: Liu et al. 2016, eqs. 6-7, https://arxiv.org/abs/1612.02295; SphereFace: Liu et al. 2017,
    https://arxiv.org/abs/1704.08063
    """
    settings: dict[str, Any] = {"margin": margin, "scale": scale, "normalize_weights": normalize_weights}
    several = f"there is one weight vector a class, got weights {list(weights.shape)}. Leave sub_centers at 1."
    problem = _settings_problem(margin, scale) if weights.ndim == 2 else several
    x, targets, centers, shards, _ = begin_with_classes(
        "LargeMarginSoftmax", embeddings, labels, weights, problem=problem, normalize=False,
        reduction=reduction, world=world, **settings,
    )  # fmt: skip
    target, negatives = target_and_negatives(x, targets, centers, scale=real(scale), shards=shards, world=world)
    norms = vector_norm(x, dim=1) * replicated(vector_norm(centers, dim=2)[:, 0], process_group=world).index_select(
        0, targets
    )
    cosine = (target / norms.clamp(min=MIN_NORM)).clamp(-1, 1)
    return reduce_anchors(
        -F.logsigmoid(scale * norms * _psi(cosine, margin) - negatives), reduction=reduction, world=world
    )


def _settings_problem(margin: int, scale: float) -> str | None:
    rule = f"margin is an integer, 1 … {_MOST_MARGIN}"
    wrong = number_problem(rule, low=1, high=_MOST_MARGIN, whole=True, margin=margin)
    return wrong or positive_problem(scale=scale)


_MOST_MARGIN = 100
"""The degree of a polynomial of the cosine, whose rounding errors grow with it; the papers' is 4 at most."""


class LargeMarginSoftmax(ClassLoss, function=large_margin_softmax, check=_settings_problem):
    """The parameter is ``loss.weights``; :class:`ClassLoss` documents how it is drawn and shared. Here their norms count.

    Examples:
        >>> loss = LargeMarginSoftmax(2, 2, margin=2)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)})
        >>> loss(torch.eye(2), torch.tensor([1, 0])).detach()
        tensor(2.1269)
    """

    refused = ("sub_centers", "shard_over")


class SphereFace(LargeMarginSoftmax, function=large_margin_softmax, check=_settings_problem):
    """This class normalises weights by default: it is :class:`LargeMarginSoftmax` with ``normalize_weights=True``.

    Examples:
        >>> loss = SphereFace(2, 2, margin=2)
        >>> _ = loss.load_state_dict({"weights": 3 * torch.eye(2)})
        >>> loss(torch.eye(2), torch.tensor([1, 0])).detach()
        tensor(2.1269)
    """

    def __init__(
        self, num_classes: int, embedding_size: int, *, normalize_weights: bool = True, **settings: Any
    ) -> None:
        super().__init__(num_classes, embedding_size, normalize_weights=normalize_weights, **settings)


def _psi(cosine: Tensor, margin: int) -> Tensor:
    """Return ψ(θ), with cos(m θ) as the Chebyshev polynomial of cos θ, whose gradient is finite at θ = 0 and π."""
    before, multiple = torch.ones_like(cosine), cosine
    for _ in range(margin - 1):
        before, multiple = multiple, 2 * cosine * multiple - before
    k = (cosine.detach().acos() * (margin / math.pi)).floor().clamp(max=margin - 1)
    return (1 - 2 * (k % 2)) * multiple - 2 * k
