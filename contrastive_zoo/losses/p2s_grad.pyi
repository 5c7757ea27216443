# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.class_loss import ClassLoss
from contrastive_zoo.world import ALONE, World

def p2s_grad(
    embeddings: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    weights: Float[Tensor, "C d"],
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    """Compute the mean squared error of cosines to all C classes, whose gradient is the probability-to-similarity gradient.

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

class P2SGrad(ClassLoss):
    """Compute the mean squared error of cosines to all C classes, whose gradient is the probability-to-similarity gradient.

    Dense: ``mse_loss(z @ w.T, one_hot(y))``, with z the unit rows, w the unit weights, y the labels.

        loss_i = 1/C Σ_j (z_i·w_j − [j = y_i])²

    The sum over classes is z_i·G z_i with G = Σ_j w_j w_jᵀ, a d × d matrix, so no N × C matrix exists. The value and the
    gradient of embeddings are those of pytorch-metric-learning's P2SGradLoss. That class overwrites its weights by
    their unit vectors at each call; here the gradient passes through their normalisation instead.

    The parameter is ``loss.weights``; :class:`ClassLoss` documents how it is drawn and shared.

    Called as ``loss(embeddings, labels)``:

    - embeddings: [n, d], n may differ between ranks.
    - labels: [n] classes 0 … C − 1.

    Args:
        num_classes: C; labels are 0 … C − 1.
        embedding_size: d.
        reduction: ``"mean"`` over all ranks' rows, ``"sum"``, or ``"none"`` for the local rows, [n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: labels that are no classes, weights of another width, or what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> loss = P2SGrad(2, 2)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)})
        >>> loss(torch.eye(2), torch.tensor([0, 0])).detach()
        tensor(0.5000)

    Source: Zhang et al. 2019, eq. 11, https://arxiv.org/abs/1905.02479
    """

    num_classes: int
    embedding_size: int
    reduction: Reduction
    check_finite: bool

    def __init__(
        self, num_classes: int, embedding_size: int, *, reduction: Reduction = "mean", check_finite: bool = True
    ) -> None: ...
    def __call__(
        self, embeddings: Float[Tensor, "n d"], labels: Int[Tensor, " n"] | None = None, *, world: World | None = None
    ) -> Tensor: ...
