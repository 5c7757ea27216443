# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float, Int
from torch import Tensor, nn

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.class_loss import ClassLoss
from contrastive_zoo.world import ALONE, World

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
    """Compute the cross-entropies of a sample's index in the training set, given its embedding in either modality.

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

class InstanceLoss(ClassLoss):
    """Compute the cross-entropies of a sample's index in the training set, given its embedding in either modality.

    With x_i and y_i the embeddings of sample i, w_j the weights of sample j of the training set, and c_i the index,

        loss_i = log Σ_j exp(x_i·w_j / t)  −  x_i·w_{c_i} / t  +  log Σ_j exp(y_i·w_j / t)  −  y_i·w_{c_i} / t

    Dense: ``cross_entropy(x @ w.T / t, c) + cross_entropy(y @ w.T / t, c)``. Both modalities meet in the weights, which
    are as many as the training set has samples; ``shard_over`` splits them over the ranks.

    The parameter is ``loss.weights``; :class:`ClassLoss` documents how it is drawn, shared and sharded. Here their norms
    count, unless ``normalize=True``.

    Called as ``loss(x, y, labels)``:

    - x: embeddings in one modality, [n, d]; n may differ between ranks.
    - y: embeddings in the other, [n, d].
    - labels: c, [n], 0 … C − 1: indices of the samples in the training set, or groups of samples.

    Args:
        num_classes: C; labels are 0 … C − 1.
        embedding_size: d.
        sub_centers: weight vectors per class; None is 1, or 10 for SoftTriple.
        shard_over: the ranks that classes are split over, ``World.of()`` or ``World.of(group)``, the same that share the
            batch; None keeps all weights on every rank.
        temperature: t > 0; a tensor is learnable.
        normalize: normalise embeddings and weights to unit length first; the paper does not.
        reduction: ``"mean"`` over all ranks' samples (nats per sample), ``"sum"``, or ``"none"`` for the local samples, [n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: towers that do not pair, labels that are no classes, weights of another width, or what any
            :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> loss = InstanceLoss(2, 2)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)})
        >>> loss(torch.eye(2), torch.eye(2), torch.arange(2)).detach()
        tensor(0.6265)

    Source: Zheng et al. 2020, eqs. 4-7, https://arxiv.org/abs/1711.05535
    """

    num_classes: int
    embedding_size: int
    sub_centers: int | None
    shard_over: World | None
    temperature: float | Tensor | nn.Module
    normalize: bool
    reduction: Reduction
    check_finite: bool

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        *,
        sub_centers: int | None = None,
        shard_over: World | None = None,
        temperature: float | Tensor | nn.Module = 1.0,
        normalize: bool = False,
        reduction: Reduction = "mean",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self,
        x: Float[Tensor, "n d"],
        y: Float[Tensor, "n d"],
        labels: Int[Tensor, " n"] | None = None,
        *,
        world: World | None = None,
    ) -> Tensor: ...
