# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float
from torch import Tensor, nn

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.world import ALONE, World

def nt_xent(
    *views: Float[Tensor, "n d"],
    temperature: float | Tensor = 0.1,
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    """Compute the normalised-temperature cross-entropy over two or more views.

    With z the unit rows of all views of all ranks and P(i) the other views of row i's sample,

        loss = mean_i [ log Σ_{k≠i} exp(z_i·z_k / t)  −  mean_{p∈P(i)} z_i·z_p / t ]

    For two views this is ``cross_entropy((z @ z.T / t).fill_diagonal_(-inf), partner)``, without the 2N × 2N matrix.
    SimCLR trains with t = 0.1 on ImageNet and 0.5 on CIFAR-10; lightly's default is 0.5.

    Args:
        views: two or more of [n, d], rows of one sample at the same index; n may differ between ranks.
        temperature: t > 0, dimensionless; a tensor is learnable.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' anchors (nats), ``"sum"``, or ``"none"`` for the local anchors, view
            after view, [views · n].
        world: the ranks that share the batch.

    Raises:
        ValueError: fewer than two views, or what any :class:`Loss` refuses.

    Examples:
        >>> nt_xent(torch.eye(2), torch.eye(2), temperature=1.0)   # log(e + 2) − 1
        tensor(0.5514)

    Source: Chen et al. 2020, eq. 1, https://arxiv.org/abs/2002.05709
    """

class NTXent(Loss):
    """Compute the normalised-temperature cross-entropy over two or more views.

    With z the unit rows of all views of all ranks and P(i) the other views of row i's sample,

        loss = mean_i [ log Σ_{k≠i} exp(z_i·z_k / t)  −  mean_{p∈P(i)} z_i·z_p / t ]

    For two views this is ``cross_entropy((z @ z.T / t).fill_diagonal_(-inf), partner)``, without the 2N × 2N matrix.
    SimCLR trains with t = 0.1 on ImageNet and 0.5 on CIFAR-10; lightly's default is 0.5.

    Called as ``loss(view1, view2, …)``:

    - views: two or more of [n, d], rows of one sample at the same index; n may differ between ranks.

    Args:
        temperature: t > 0, dimensionless; a tensor is learnable.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' anchors (nats), ``"sum"``, or ``"none"`` for the local anchors, view
            after view, [views · n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: fewer than two views, or what any :class:`Loss` refuses.

    Examples:
        >>> NTXent(temperature=1.0)(torch.eye(2), torch.eye(2))   # log(e + 2) − 1
        tensor(0.5514)

    Source: Chen et al. 2020, eq. 1, https://arxiv.org/abs/2002.05709
    """

    temperature: float | Tensor | nn.Module
    normalize: bool
    reduction: Reduction
    check_finite: bool

    def __init__(
        self,
        *,
        temperature: float | Tensor | nn.Module = 0.1,
        normalize: bool = True,
        reduction: Reduction = "mean",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(self, *views: Float[Tensor, "n d"], world: World | None = None) -> Tensor: ...
