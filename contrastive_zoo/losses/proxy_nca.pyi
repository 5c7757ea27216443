# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float, Int
from torch import Tensor, nn

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.class_loss import ClassLoss
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
    """Compute −log of the probability of a row's own proxy among all proxies, by squared distances of unit vectors.

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

class ProxyNCA(ClassLoss):
    """Compute −log of the probability of a row's own proxy among all proxies, by squared distances of unit vectors.

    With z the unit rows, p the unit proxies and y the labels,

        loss_i = −log [ exp(−‖z_i − p_{y_i}‖² / t) / Σ_j exp(−‖z_i − p_j‖² / t) ]

    As ‖z − p‖² = 2 − 2 z·p, this is :func:`normalized_softmax` at t/2; pytorch-metric-learning's softmax_scale is 1/t.
    The default is ProxyNCA++, with t = 1/9. The original ProxyNCA has t = 1 and leaves the own proxy out of the denominator.

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
        temperature: t > 0, in units of squared distance; a tensor is learnable.
        reduction: ``"mean"`` over all ranks' rows (nats per row), ``"sum"``, or ``"none"`` for the local rows, [n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: labels that are no classes, proxies of another width, or what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> loss = ProxyNCA(2, 2, temperature=2.0)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)})
        >>> loss(torch.eye(2), torch.arange(2)).detach()   # −log(1 / (1 + e⁻¹))
        tensor(0.3133)

    Source: Teh et al. 2020, §3, https://arxiv.org/abs/2004.01113
    """

    num_classes: int
    embedding_size: int
    sub_centers: int | None
    shard_over: World | None
    temperature: float | Tensor | nn.Module
    reduction: Reduction
    check_finite: bool

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        *,
        sub_centers: int | None = None,
        shard_over: World | None = None,
        temperature: float | Tensor | nn.Module = 1 / 9,
        reduction: Reduction = "mean",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self, embeddings: Float[Tensor, "n d"], labels: Int[Tensor, " n"] | None = None, *, world: World | None = None
    ) -> Tensor: ...
