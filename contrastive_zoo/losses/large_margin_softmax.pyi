# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.class_loss import ClassLoss
from contrastive_zoo.world import ALONE, World

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
    """Compute the softmax over classes with the target logit ‖x‖ ‖w‖ ψ(θ); embeddings are not normalised.

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

class LargeMarginSoftmax(ClassLoss):
    """Compute the softmax over classes with the target logit ‖x‖ ‖w‖ ψ(θ); embeddings are not normalised.

    With θ the angle between row x_i and the weights w of its class, and m the margin,

        ψ(θ) = (−1)^k cos(m θ) − 2k   for θ in [kπ/m, (k + 1)π/m]
        loss_i = −log σ( s ‖x_i‖ ‖w_{y_i}‖ ψ(θ_i)  −  log Σ_{j≠y_i} exp(s x_i·w_j) )

    With ``normalize_weights`` all w have unit length, and the loss is SphereFace (A-Softmax). The papers mix ψ(θ) with
    cos θ and anneal the share of cos θ to 0 in training; this is the loss without that share, as
    pytorch-metric-learning's LargeMarginSoftmaxLoss and SphereFaceLoss.

    The parameter is ``loss.weights``; :class:`ClassLoss` documents how it is drawn and shared. Here their norms count.

    Called as ``loss(embeddings, labels)``:

    - embeddings: [n, d], n may differ between ranks.
    - labels: [n] classes 0 … C − 1.

    Args:
        num_classes: C; labels are 0 … C − 1.
        embedding_size: d.
        margin: m, an integer of at least 1.
        scale: s > 0.
        normalize_weights: whether weights are normalised to unit length first.
        reduction: ``"mean"`` over all ranks' rows (nats per row), ``"sum"``, or ``"none"`` for the local rows, [n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: labels that are no classes, weights of another width, a margin that is no positive integer, a scale that
            is not positive, or what any :class:`Loss` refuses.

    Examples:
        >>> loss = LargeMarginSoftmax(2, 2, margin=2)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)})
        >>> loss(torch.eye(2), torch.tensor([1, 0])).detach()
        tensor(2.1269)

    Source: Liu et al. 2016, eqs. 6-7, https://arxiv.org/abs/1612.02295; SphereFace: Liu et al. 2017,
    https://arxiv.org/abs/1704.08063
    """

    num_classes: int
    embedding_size: int
    margin: int
    scale: float
    normalize_weights: bool
    reduction: Reduction
    check_finite: bool

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        *,
        margin: int = 4,
        scale: float = 1.0,
        normalize_weights: bool = False,
        reduction: Reduction = "mean",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self, embeddings: Float[Tensor, "n d"], labels: Int[Tensor, " n"] | None = None, *, world: World | None = None
    ) -> Tensor: ...

class SphereFace(LargeMarginSoftmax):
    """Compute the softmax over classes with the target logit ‖x‖ ‖w‖ ψ(θ); embeddings are not normalised.

    With θ the angle between row x_i and the weights w of its class, and m the margin,

        ψ(θ) = (−1)^k cos(m θ) − 2k   for θ in [kπ/m, (k + 1)π/m]
        loss_i = −log σ( s ‖x_i‖ ‖w_{y_i}‖ ψ(θ_i)  −  log Σ_{j≠y_i} exp(s x_i·w_j) )

    With ``normalize_weights`` all w have unit length, and the loss is SphereFace (A-Softmax). The papers mix ψ(θ) with
    cos θ and anneal the share of cos θ to 0 in training; this is the loss without that share, as
    pytorch-metric-learning's LargeMarginSoftmaxLoss and SphereFaceLoss.

    This class normalises weights by default: it is :class:`LargeMarginSoftmax` with ``normalize_weights=True``.

    Called as ``loss(embeddings, labels)``:

    - embeddings: [n, d], n may differ between ranks.
    - labels: [n] classes 0 … C − 1.

    Args:
        num_classes: C; labels are 0 … C − 1.
        embedding_size: d.
        margin: m, an integer of at least 1.
        scale: s > 0.
        normalize_weights: whether weights are normalised to unit length first.
        reduction: ``"mean"`` over all ranks' rows (nats per row), ``"sum"``, or ``"none"`` for the local rows, [n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: labels that are no classes, weights of another width, a margin that is no positive integer, a scale that
            is not positive, or what any :class:`Loss` refuses.

    Examples:
        >>> loss = SphereFace(2, 2, margin=2)
        >>> _ = loss.load_state_dict({"weights": 3 * torch.eye(2)})
        >>> loss(torch.eye(2), torch.tensor([1, 0])).detach()
        tensor(2.1269)

    Source: Liu et al. 2016, eqs. 6-7, https://arxiv.org/abs/1612.02295; SphereFace: Liu et al. 2017,
    https://arxiv.org/abs/1704.08063
    """

    num_classes: int
    embedding_size: int
    margin: int
    scale: float
    normalize_weights: bool
    reduction: Reduction
    check_finite: bool

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        *,
        margin: int = 4,
        scale: float = 1.0,
        normalize_weights: bool = True,
        reduction: Reduction = "mean",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self, embeddings: Float[Tensor, "n d"], labels: Int[Tensor, " n"] | None = None, *, world: World | None = None
    ) -> Tensor: ...
