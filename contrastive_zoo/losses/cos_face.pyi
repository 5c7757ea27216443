# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.class_loss import ClassLoss
from contrastive_zoo.world import ALONE, World

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
    """Compute the large-margin cosine loss.

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

class CosFace(ClassLoss):
    """Compute the large-margin cosine loss.

    Dense: ``cross_entropy(s * (z @ w.T - m * one_hot(y)), y)``, with z the unit rows, w the unit weights, y the labels.

        loss_i = −log σ( s (z_i·w_{y_i} − m)  −  log Σ_{j≠y_i} exp(s z_i·w_j) )

    The parameter is ``loss.weights``; :class:`ClassLoss` documents how it is drawn, shared and sharded.

    Called as ``loss(embeddings, labels)``:

    - embeddings: [n, d], n may differ between ranks.
    - labels: [n] classes 0 … C − 1.

    Args:
        num_classes: C; labels are 0 … C − 1.
        embedding_size: d.
        sub_centers: weight vectors per class; None is 1, or 10 for SoftTriple.
        shard_over: the ranks that classes are split over, ``World.of()`` or ``World.of(group)``, the same that share the
            batch; None keeps all weights on every rank.
        margin: m, in units of the cosine.
        scale: s > 0, dimensionless.
        reduction: ``"mean"`` over all ranks' rows (nats per row), ``"sum"``, or ``"none"`` for the local rows, [n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: labels that are no classes, weights of another width, a scale <= 0, a margin that is not finite, or
            what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> loss = CosFace(2, 2, margin=0.5, scale=2.0)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)})
        >>> loss(torch.eye(2), torch.arange(2)).detach()   # log(e + 1) − 1
        tensor(0.3133)

    Source: Wang et al. 2018, eq. 4, https://arxiv.org/abs/1801.09414
    """

    num_classes: int
    embedding_size: int
    sub_centers: int | None
    shard_over: World | None
    margin: float
    scale: float
    reduction: Reduction
    check_finite: bool

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        *,
        sub_centers: int | None = None,
        shard_over: World | None = None,
        margin: float = 0.35,
        scale: float = 64.0,
        reduction: Reduction = "mean",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self, embeddings: Float[Tensor, "n d"], labels: Int[Tensor, " n"] | None = None, *, world: World | None = None
    ) -> Tensor: ...
