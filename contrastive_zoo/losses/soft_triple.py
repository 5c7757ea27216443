"""SoftTriple: a normalised softmax with several centres per class, averaged with softmax weights."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.collectives import replicated
from contrastive_zoo.engine.precision import at_least_float32, matmul
from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.checks import number_problem, positive_problem
from contrastive_zoo.loss_base.class_loss import ClassLoss, softmax_over_classes
from contrastive_zoo.world import ALONE, World


@checked
def soft_triple(
    embeddings: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    weights: Float[Tensor, "C d"] | Float[Tensor, "C k d"],
    la: float = 20.0,
    gamma: float = 0.1,
    margin: float = 0.01,
    tau: float = 0.2,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Compute the cross-entropy over classes whose similarity is the softmax-weighted mean over their centres.

    With z the unit rows, w the unit centres and y the labels,

        S_ij   = Σ_k softmax_k(z_i·w_jk / γ) z_i·w_jk
        loss_i = −log σ( λ (S_{i y_i} − δ)  −  log Σ_{j≠y_i} exp(λ S_ij) )  +  τ R

    and R = Σ_j Σ_{k<l} ‖w_jk − w_jl‖ / (C K (K − 1)) over the K centres of each class, which merges redundant ones.

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] classes 0 … C − 1.
        weights: centres [C, k, d], equal on every rank.
        la: λ > 0, dimensionless.
        gamma: γ > 0, the temperature of the softmax over centres.
        margin: δ, in units of the cosine.
        tau: τ ≥ 0; pytorch-metric-learning has no such term, ``tau=0``.
        reduction: ``"mean"`` over all ranks' rows (nats per row), ``"sum"``, or ``"none"`` for the local rows, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: labels that are no classes, centres of another width, a la or gamma that is not positive, a
            negative tau, or what any :class:`Loss` refuses.

    Examples:
        >>> eye = torch.eye(2)
        >>> soft_triple(eye, torch.arange(2), weights=eye, la=1.0, margin=0.0)   # log(e + 1) − 1
        tensor(0.3133)

    Source: Qian et al. 2019, §3, https://arxiv.org/abs/1909.05235
    """

    def soft_pooling(similarity: Tensor) -> Tensor:
        return ((similarity / gamma).softmax(2) * similarity).sum(2)

    def penalty() -> Tensor:
        return tau * _center_distances(replicated(weights, process_group=world))

    return softmax_over_classes(
        "SoftTriple", embeddings, labels, weights, target_function=lambda s: s - margin, scale=la, pooling=soft_pooling,
        penalty=penalty if tau and weights.ndim == 3 else None, problem=_settings_problem(la, gamma, margin, tau),
        gamma=gamma, margin=margin, tau=tau, reduction=reduction, world=world,
    )  # fmt: skip


def _settings_problem(la: float, gamma: float, margin: float, tau: float) -> str | None:
    return positive_problem(la=la, gamma=gamma) or number_problem(low=0, tau=tau) or number_problem(margin=margin)


class SoftTriple(ClassLoss, function=soft_triple, check=_settings_problem):
    """The parameter is ``loss.weights``; :class:`ClassLoss` documents how it is drawn, shared and sharded.
    ``sub_centers`` is 10 by default.

    Examples:
        >>> loss = SoftTriple(2, 2, sub_centers=1, la=1.0, margin=0.0)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)})
        >>> loss(torch.eye(2), torch.arange(2)).detach()   # log(e + 1) − 1
        tensor(0.3133)
    """

    refused = ("shard_over",)
    default_centers = 10


def _center_distances(centres: Tensor) -> Tensor:
    """Return R of :func:`soft_triple`; 1e-5 keeps the gradient finite where centres are equal, as in the authors' code."""
    unit, (classes, k, _) = F.normalize(at_least_float32(centres), dim=2), centres.shape
    first, second = torch.triu_indices(k, k, 1)
    cosines = matmul(unit, unit.mT)[:, first, second]
    return (2 + 1e-5 - 2 * cosines).sqrt().sum() / max(1, classes * k * (k - 1))
