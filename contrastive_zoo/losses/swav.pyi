# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float
from torch import Tensor, nn

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.class_loss import ConstructingLoss
from contrastive_zoo.world import ALONE, World

def swav(
    *views: Float[Tensor, "n d"],
    prototypes: Float[Tensor, "K d"],
    temperature: float | Tensor = 0.1,
    epsilon: float = 0.05,
    iterations: int = 3,
    code_views: int = 2,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    """Compute the loss of swapped predictions of cluster assignments.

    With z the unit rows of view v, c the unit prototypes, and q the balanced assignment of view u's rows of all ranks,

        loss_i = − mean over u ≤ code_views and v ≠ u of Σ_k q^u_ik log softmax_k(z^v_i·c / t)

    The codes q carry no gradient. They come from Sinkhorn's iterations on exp(z·c / ε), K numbers an iteration and rank.

    Args:
        views: two or more of [n, d], the full-size crops first; n may differ between ranks.
        prototypes: [K, d], equal on every rank. The authors and lightly normalise the parameter itself before a step;
            here the loss normalises it, so its gradient is orthogonal to it.
        temperature: t > 0, dimensionless; a tensor is learnable.
        epsilon: ε > 0, the temperature of the assignments.
        iterations: number of Sinkhorn iterations, 0 … 10,000; 0 is a softmax.
        code_views: number of first views that give codes; the other views only predict.
        reduction: ``"mean"`` over all ranks' samples (nats per sample), ``"sum"``, or ``"none"`` for the local samples, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: fewer than two views, views of different shape, prototypes of another width, settings out of range,
            NaN or infinite rows, widths or dtypes that differ between ranks, or no rows on any rank.

    Examples:
        >>> eye = torch.eye(2)
        >>> swav(eye, eye, prototypes=eye, temperature=1.0)   # codes are one-hot: log(e + 1) − 1
        tensor(0.3133)

    Source: Caron et al. 2020, eqs. 2-5, https://arxiv.org/abs/2006.09882
    """

class SwAV(ConstructingLoss):
    """Compute the loss of swapped predictions of cluster assignments.

    With z the unit rows of view v, c the unit prototypes, and q the balanced assignment of view u's rows of all ranks,

        loss_i = − mean over u ≤ code_views and v ≠ u of Σ_k q^u_ik log softmax_k(z^v_i·c / t)

    The codes q carry no gradient. They come from Sinkhorn's iterations on exp(z·c / ε), K numbers an iteration and rank.

    ``loss.prototypes`` is the parameter, drawn standard normal.

    Called as ``loss(view1, view2, …)``:

    - views: two or more of [n, d], the full-size crops first; n may differ between ranks.

    Args:
        num_prototypes: K.
        embedding_size: d.
        temperature: t > 0, dimensionless; a tensor is learnable.
        epsilon: ε > 0, the temperature of the assignments.
        iterations: number of Sinkhorn iterations, 0 … 10,000; 0 is a softmax.
        code_views: number of first views that give codes; the other views only predict.
        reduction: ``"mean"`` over all ranks' samples (nats per sample), ``"sum"``, or ``"none"`` for the local samples, [n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: a number of prototypes or an embedding_size below 1, or above what memory holds.
        ValueError: fewer than two views, views of different shape, prototypes of another width, settings out of range,
            NaN or infinite rows, widths or dtypes that differ between ranks, or no rows on any rank.

    Examples:
        >>> loss = SwAV(2, 2, temperature=1.0)
        >>> _ = loss.load_state_dict({"prototypes": torch.eye(2)})
        >>> loss(torch.eye(2), torch.eye(2)).detach()   # codes are one-hot: log(e + 1) − 1
        tensor(0.3133)

    Source: Caron et al. 2020, eqs. 2-5, https://arxiv.org/abs/2006.09882
    """

    num_prototypes: int
    embedding_size: int
    temperature: float | Tensor | nn.Module
    epsilon: float
    iterations: int
    code_views: int
    reduction: Reduction
    check_finite: bool

    def __init__(
        self,
        num_prototypes: int,
        embedding_size: int,
        *,
        temperature: float | Tensor | nn.Module = 0.1,
        epsilon: float = 0.05,
        iterations: int = 3,
        code_views: int = 2,
        reduction: Reduction = "mean",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(self, *views: Float[Tensor, "n d"], world: World | None = None) -> Tensor: ...
