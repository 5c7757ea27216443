# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.world import ALONE, World

def spectral_contrastive(
    view1: Float[Tensor, "n d"], view2: Float[Tensor, "n d"], *, mu: float = 1.0, world: World = ALONE
) -> Float[Tensor, ""]:
    """Partners' dot products against the squares of all others', in closed form.

    Rows longer than √μ are shortened to that, others are left; then, with a, b the rows of all ranks,

        loss = −2 mean_i a_i·b_i  +  mean_{i≠j} (a_i·b_j)²

    The second sum is ⟨AᵀA, BᵀB⟩ − Σ_i (a_i·b_i)²: d × d numbers, not N × N, and 0 without a pair. A number
    without a unit where rows have none.

    Args:
        view1: a, [n, d]; n may differ between ranks.
        view2: b, [n, d]; rows of one sample stand at the same index.
        mu: largest squared length; ``math.inf`` for the paper's loss, 1 in the authors' code.
        world: the ranks that share the batch.

    Raises:
        ValueError: a mu that is not positive, or what any :class:`Loss` refuses.

    Example:
        >>> a = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
        >>> spectral_contrastive(a, a)   # −2 · 1 + 0.6²
        tensor(-1.6400)

    Source: HaoChen et al. 2021, §3, https://arxiv.org/abs/2106.04156
    """

class SpectralContrastive(Loss):
    """Partners' dot products against the squares of all others', in closed form.

    Rows longer than √μ are shortened to that, others are left; then, with a, b the rows of all ranks,

        loss = −2 mean_i a_i·b_i  +  mean_{i≠j} (a_i·b_j)²

    The second sum is ⟨AᵀA, BᵀB⟩ − Σ_i (a_i·b_i)²: d × d numbers, not N × N, and 0 without a pair. A number
    without a unit where rows have none.

    Called as ``loss(view1, view2)``:

    - view1: a, [n, d]; n may differ between ranks.
    - view2: b, [n, d]; rows of one sample stand at the same index.

    Args:
        mu: largest squared length; ``math.inf`` for the paper's loss, 1 in the authors' code.
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: a mu that is not positive, or what any :class:`Loss` refuses.

    Example:
        >>> a = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
        >>> SpectralContrastive()(a, a)   # −2 · 1 + 0.6²
        tensor(-1.6400)

    Source: HaoChen et al. 2021, §3, https://arxiv.org/abs/2106.04156
    """

    mu: float
    check_finite: bool

    def __init__(self, *, mu: float = 1.0, check_finite: bool = True) -> None: ...
    def __call__(
        self, view1: Float[Tensor, "n d"], view2: Float[Tensor, "n d"], *, world: World | None = None
    ) -> Tensor: ...
