# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.class_loss import ClassLoss
from contrastive_zoo.world import ALONE, World

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
    """Compute the cross-entropy over classes whose similarity is the softmax-weighted mean over their centres.

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

class SoftTriple(ClassLoss):
    """Compute the cross-entropy over classes whose similarity is the softmax-weighted mean over their centres.

    With z the unit rows, w the unit centres and y the labels,

        S_ij   = Σ_k softmax_k(z_i·w_jk / γ) z_i·w_jk
        loss_i = −log σ( λ (S_{i y_i} − δ)  −  log Σ_{j≠y_i} exp(λ S_ij) )  +  τ R

    and R = Σ_j Σ_{k<l} ‖w_jk − w_jl‖ / (C K (K − 1)) over the K centres of each class, which merges redundant ones.

    The parameter is ``loss.weights``; :class:`ClassLoss` documents how it is drawn, shared and sharded.
    ``sub_centers`` is 10 by default.

    Called as ``loss(embeddings, labels)``:

    - embeddings: [n, d], n may differ between ranks.
    - labels: [n] classes 0 … C − 1.

    Args:
        num_classes: C; labels are 0 … C − 1.
        embedding_size: d.
        sub_centers: weight vectors per class; None is 1, or 10 for SoftTriple.
        la: λ > 0, dimensionless.
        gamma: γ > 0, the temperature of the softmax over centres.
        margin: δ, in units of the cosine.
        tau: τ ≥ 0; pytorch-metric-learning has no such term, ``tau=0``.
        reduction: ``"mean"`` over all ranks' rows (nats per row), ``"sum"``, or ``"none"`` for the local rows, [n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: labels that are no classes, centres of another width, a la or gamma that is not positive, a
            negative tau, or what any :class:`Loss` refuses.

    Examples:
        >>> loss = SoftTriple(2, 2, sub_centers=1, la=1.0, margin=0.0)
        >>> _ = loss.load_state_dict({"weights": torch.eye(2)})
        >>> loss(torch.eye(2), torch.arange(2)).detach()   # log(e + 1) − 1
        tensor(0.3133)

    Source: Qian et al. 2019, §3, https://arxiv.org/abs/1909.05235
    """

    num_classes: int
    embedding_size: int
    sub_centers: int | None
    la: float
    gamma: float
    margin: float
    tau: float
    reduction: Reduction
    check_finite: bool

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        *,
        sub_centers: int | None = None,
        la: float = 20.0,
        gamma: float = 0.1,
        margin: float = 0.01,
        tau: float = 0.2,
        reduction: Reduction = "mean",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self, embeddings: Float[Tensor, "n d"], labels: Int[Tensor, " n"] | None = None, *, world: World | None = None
    ) -> Tensor: ...
