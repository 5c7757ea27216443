# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.world import ALONE, World

def barlow_twins(
    view1: Float[Tensor, "n d"],
    view2: Float[Tensor, "n d"],
    *,
    lambda_: float = 0.0051,
    eps: float = 1e-05,
    world: World = ALONE,
) -> Float[Tensor, ""]:
    """Compute the redundancy reduction loss; features are normalised over the batch, embeddings are not.

    With C the cross-correlation of features over the rows of all ranks, with standard deviations √(variance + ε) over N,

        loss = Σ_k (1 − C_kk)²  +  λ Σ_{k≠l} C_kl²

    ε and the divisor N are those of the authors' ``BatchNorm1d(affine=False)``; the paper has ε = 0. The authors' code
    multiplies the loss by about 0.024 for its optimiser; lightly has ``lambda_=5e-3``. The correlations of a single row
    are 0. The loss has no unit.

    Args:
        view1: [n, d]; n may differ between ranks.
        view2: [n, d]; rows of one sample stand at the same index.
        lambda_: λ ≥ 0.
        eps: ε > 0, in units of squared features.
        world: the ranks that share the batch.

    Raises:
        ValueError: an eps that is not positive, a negative lambda_, or what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> a = torch.tensor([[1.0], [-1.0]])
        >>> barlow_twins(a, -a)   # (1 + 1)²
        tensor(4.0000)

    Source: Zbontar et al. 2021, eqs. 1-2, https://arxiv.org/abs/2103.03230
    """

class BarlowTwins(Loss):
    """Compute the redundancy reduction loss; features are normalised over the batch, embeddings are not.

    With C the cross-correlation of features over the rows of all ranks, with standard deviations √(variance + ε) over N,

        loss = Σ_k (1 − C_kk)²  +  λ Σ_{k≠l} C_kl²

    ε and the divisor N are those of the authors' ``BatchNorm1d(affine=False)``; the paper has ε = 0. The authors' code
    multiplies the loss by about 0.024 for its optimiser; lightly has ``lambda_=5e-3``. The correlations of a single row
    are 0. The loss has no unit.

    Called as ``loss(view1, view2)``:

    - view1: [n, d]; n may differ between ranks.
    - view2: [n, d]; rows of one sample stand at the same index.

    Args:
        lambda_: λ ≥ 0.
        eps: ε > 0, in units of squared features.
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: an eps that is not positive, a negative lambda_, or what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> a = torch.tensor([[1.0], [-1.0]])
        >>> BarlowTwins()(a, -a)   # (1 + 1)²
        tensor(4.0000)

    Source: Zbontar et al. 2021, eqs. 1-2, https://arxiv.org/abs/2103.03230
    """

    lambda_: float
    eps: float
    check_finite: bool

    def __init__(self, *, lambda_: float = 0.0051, eps: float = 1e-05, check_finite: bool = True) -> None: ...
    def __call__(
        self, view1: Float[Tensor, "n d"], view2: Float[Tensor, "n d"], *, world: World | None = None
    ) -> Tensor: ...
