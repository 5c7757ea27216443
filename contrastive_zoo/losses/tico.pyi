# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.loss_base.class_loss import ConstructingLoss
from contrastive_zoo.world import ALONE, World

def tico(
    view1: Float[Tensor, "n d"],
    view2: Float[Tensor, "n d"],
    *,
    covariance: Float[Tensor, "d d"],
    beta: float = 0.9,
    rho: float = 8.0,
    world: World = ALONE,
) -> Float[Tensor, ""]:
    """Compute transformation invariance and covariance contrast.

    With a, b the unit rows of the two views of all ranks and M the moving average of past second moments,

        C = β M + (1 − β)/N Σ_i a_i a_iᵀ
        loss = mean_i [ 1 − a_i·b_i  +  ρ a_iᵀ C a_i ]

    C has no gradient. Equal to lightly's TiCoLoss. Its memory is one d × d matrix, no queue of negatives.

    Args:
        view1: a, [n, d]; n may differ between ranks.
        view2: b, [n, d], usually of a momentum encoder; rows of one sample stand at the same index.
        covariance: M; the buffer of :class:`TiCo`.
        beta: β, 0 … 1.
        rho: ρ.
        world: the ranks that share the batch.

    Raises:
        ValueError: a β outside 0 … 1, a ρ that is not finite, a covariance of another width, or what any :class:`Loss`
            refuses.

    Examples:
        >>> eye = torch.eye(2)
        >>> tico(eye, eye, covariance=torch.zeros(2, 2), beta=0.5, rho=1.0)   # 0 + ½ · ½
        tensor(0.2500)

    Source: Zhu et al. 2022, https://arxiv.org/abs/2206.10698
    """

class TiCo(ConstructingLoss):
    """Compute transformation invariance and covariance contrast.

    With a, b the unit rows of the two views of all ranks and M the moving average of past second moments,

        C = β M + (1 − β)/N Σ_i a_i a_iᵀ
        loss = mean_i [ 1 − a_i·b_i  +  ρ a_iᵀ C a_i ]

    C has no gradient. Equal to lightly's TiCoLoss. Its memory is one d × d matrix, no queue of negatives.

    The moving average is the buffer ``covariance``, which starts at 0.

    In training mode each call uses the buffer and then stores C in it: it is equal on every rank, and equal to that of
    one process.

    Called as ``loss(view1, view2)``:

    - view1: a, [n, d]; n may differ between ranks.
    - view2: b, [n, d], usually of a momentum encoder; rows of one sample stand at the same index.

    Args:
        embedding_size: d.
        beta: β, 0 … 1.
        rho: ρ.
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: an embedding_size below 1, or above what memory holds.
        ValueError: a β outside 0 … 1, a ρ that is not finite, a covariance of another width, or what any :class:`Loss`
            refuses.

    Examples:
        >>> eye = torch.eye(2)
        >>> TiCo(2, beta=0.5, rho=1.0)(eye, eye)   # 0 + ½ · ½
        tensor(0.2500)

    Source: Zhu et al. 2022, https://arxiv.org/abs/2206.10698
    """

    embedding_size: int
    beta: float
    rho: float
    check_finite: bool
    covariance: Tensor

    def __init__(
        self, embedding_size: int, *, beta: float = 0.9, rho: float = 8.0, check_finite: bool = True
    ) -> None: ...
    def __call__(
        self, view1: Float[Tensor, "n d"], view2: Float[Tensor, "n d"], *, world: World | None = None
    ) -> Tensor: ...
    def move_covariance(self, view1: Tensor, world: World) -> None:
        """Move the covariance by one step towards the second moments of the first view of all ranks."""
