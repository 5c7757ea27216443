# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.world import ALONE, World

def frossl(*views: Float[Tensor, "n d"], invariance: float = 1.0, world: World = ALONE) -> Float[Tensor, ""]:
    """Compute the log of the squared Frobenius norm of each view's second moments plus the distance of views.

    With ẑ_v the V views, each feature divided by its norm over the rows of all ranks, d features and m = mean_v ẑ_v,

        loss = Σ_v [ log ‖ẑ_vᵀ ẑ_v / tr(ẑ_vᵀ ẑ_v)‖_F²  +  λ V/N Σ_i ‖ẑ_vi − m_i‖² ]

    The traces, which are d unless a feature is 0 everywhere, have no gradient. Equal to lightly's FroSSLLoss. The
    first term is at least −log d. Only d × d matrices exist, also for N < d. A view of zeros has no first term.

    Args:
        views: two or more views of the same samples, [n, d] each; n may differ between ranks.
        invariance: λ.
        world: the ranks that share the batch.

    Raises:
        ValueError: a weight that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> frossl(torch.eye(2), torch.eye(2))   # 2 log(½² + ½²)
        tensor(-1.3863)

    Source: Skean et al. 2024, https://arxiv.org/abs/2310.02903
    """

class FroSSL(Loss):
    """Compute the log of the squared Frobenius norm of each view's second moments plus the distance of views.

    With ẑ_v the V views, each feature divided by its norm over the rows of all ranks, d features and m = mean_v ẑ_v,

        loss = Σ_v [ log ‖ẑ_vᵀ ẑ_v / tr(ẑ_vᵀ ẑ_v)‖_F²  +  λ V/N Σ_i ‖ẑ_vi − m_i‖² ]

    The traces, which are d unless a feature is 0 everywhere, have no gradient. Equal to lightly's FroSSLLoss. The
    first term is at least −log d. Only d × d matrices exist, also for N < d. A view of zeros has no first term.

    Called as ``loss(view1, view2, …)``:

    - views: two or more views of the same samples, [n, d] each; n may differ between ranks.

    Args:
        invariance: λ.
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: a weight that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> FroSSL()(torch.eye(2), torch.eye(2))   # 2 log(½² + ½²)
        tensor(-1.3863)

    Source: Skean et al. 2024, https://arxiv.org/abs/2310.02903
    """

    invariance: float
    check_finite: bool

    def __init__(self, *, invariance: float = 1.0, check_finite: bool = True) -> None: ...
    def __call__(self, *views: Float[Tensor, "n d"], world: World | None = None) -> Tensor: ...
