# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.world import ALONE, World

def orthogonal_regularization(
    embeddings: Float[Tensor, "n d"],
    *,
    mean_weight: float = 1.0,
    second_moment_weight: float = 1.0,
    world: World = ALONE,
) -> Float[Tensor, ""]:
    """Compute the squared mean similarity, and the excess of the mean squared similarity over 1/d.

    With M₁ and M₂ the means of z_i·z_j and (z_i·z_j)² over all i ≠ j, z the unit rows of all ranks,

        loss = λ₁ M₁²  +  λ₂ max(0, M₂ − 1/d)

    Random unit vectors have M₁ = 0 and M₂ = 1/d. The means follow from Σ z_i and Σ z_i z_iᵀ, so no pair is computed. A
    single row has no pair: both are 0. sentence-transformers' GlobalOrthogonalRegularizationLoss averages it over its
    input columns; add one of each column. The paper takes pairs of different classes, and adds it to another loss.

    Args:
        embeddings: [n, d], n may differ between ranks.
        mean_weight: λ₁.
        second_moment_weight: λ₂.
        world: the ranks that share the batch.

    Raises:
        ValueError: a weight that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
        >>> orthogonal_regularization(z)   # M₁ = M₂ = ⅓ < ½
        tensor(0.1111)

    Source: Zhang et al. 2017, https://arxiv.org/abs/1708.06320
    """

class OrthogonalRegularization(Loss):
    """Compute the squared mean similarity, and the excess of the mean squared similarity over 1/d.

    With M₁ and M₂ the means of z_i·z_j and (z_i·z_j)² over all i ≠ j, z the unit rows of all ranks,

        loss = λ₁ M₁²  +  λ₂ max(0, M₂ − 1/d)

    Random unit vectors have M₁ = 0 and M₂ = 1/d. The means follow from Σ z_i and Σ z_i z_iᵀ, so no pair is computed. A
    single row has no pair: both are 0. sentence-transformers' GlobalOrthogonalRegularizationLoss averages it over its
    input columns; add one of each column. The paper takes pairs of different classes, and adds it to another loss.

    Called as ``loss(embeddings)``:

    - embeddings: [n, d], n may differ between ranks.

    Args:
        mean_weight: λ₁.
        second_moment_weight: λ₂.
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: a weight that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
        >>> OrthogonalRegularization()(z)   # M₁ = M₂ = ⅓ < ½
        tensor(0.1111)

    Source: Zhang et al. 2017, https://arxiv.org/abs/1708.06320
    """

    mean_weight: float
    second_moment_weight: float
    check_finite: bool

    def __init__(
        self, *, mean_weight: float = 1.0, second_moment_weight: float = 1.0, check_finite: bool = True
    ) -> None: ...
    def __call__(self, embeddings: Float[Tensor, "n d"], *, world: World | None = None) -> Tensor: ...
