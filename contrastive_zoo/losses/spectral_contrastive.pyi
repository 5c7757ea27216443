# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.world import ALONE, World

def spectral_contrastive(
    view1: Float[Tensor, "n d"], view2: Float[Tensor, "n d"], *, mu: float = 1.0, world: World = ALONE
) -> Float[Tensor, ""]:
    """Compute squared dot products of all other pairs minus dot products of partners, in closed form.

    Rows with norms above √μ are scaled to √μ; then, with a, b the rows of all ranks,

        loss = −2 mean_i a_i·b_i  +  mean_{i≠j} (a_i·b_j)²

    The second sum is ⟨AᵀA, BᵀB⟩ − Σ_i (a_i·b_i)²: d × d numbers, not N × N; it is 0 without a pair. The
    loss has no unit if rows have none.

    Args:
        view1: a, [n, d]; n may differ between ranks.
        view2: b, [n, d]; rows of one sample stand at the same index.
        mu: largest squared norm; ``math.inf`` for the paper's loss, 1 in the authors' code.
        world: the ranks that share the batch.

    Raises:
        ValueError: a mu that is not positive, or what any :class:`Loss` refuses.

    Examples:
        >>> a = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
        >>> spectral_contrastive(a, a)   # −2 · 1 + 0.6²
        tensor(-1.6400)

    Source: HaoChen et al. 2021, §3, https://arxiv.org/abs/2106.04156
    """

class SpectralContrastive(Loss):
    """Compute squared dot products of all other pairs minus dot products of partners, in closed form.

    Rows with norms above √μ are scaled to √μ; then, with a, b the rows of all ranks,

        loss = −2 mean_i a_i·b_i  +  mean_{i≠j} (a_i·b_j)²

    The second sum is ⟨AᵀA, BᵀB⟩ − Σ_i (a_i·b_i)²: d × d numbers, not N × N; it is 0 without a pair. The
    loss has no unit if rows have none.

    Called as ``loss(view1, view2)``:

    - view1: a, [n, d]; n may differ between ranks.
    - view2: b, [n, d]; rows of one sample stand at the same index.

    Args:
        mu: largest squared norm; ``math.inf`` for the paper's loss, 1 in the authors' code.
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: a mu that is not positive, or what any :class:`Loss` refuses.

    Examples:
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
