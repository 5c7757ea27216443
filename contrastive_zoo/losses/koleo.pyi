# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.world import ALONE, World

def koleo(
    embeddings: Float[Tensor, "n d"],
    *,
    eps: float = 1e-08,
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    """Compute minus the log of the distance to the nearest neighbour, Kozachenko & Leonenko's estimate of the entropy.

    With z the unit rows of all ranks,

        loss_i = −log(min_{j≠i} ‖z_i − z_j‖ + ε)

    A single row has no neighbour and no loss; of neighbours at equal distances the first gets the gradient; equal rows have
    none. It regularises another loss: DINOv2 adds 0.1 times it, on the class tokens of each large crop by itself. DINOv2
    and lightly look for the neighbour on the own process only, and add ε to each coordinate, too.

    Args:
        embeddings: [n, d], n may differ between ranks.
        eps: ε > 0.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' rows, ``"sum"``, or ``"none"`` for the local rows, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: an eps that is not positive, or what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> koleo(torch.eye(3))   # −log √2
        tensor(-0.3466)

    Source: Sablayrolles et al. 2019, https://arxiv.org/abs/1806.03198
    """

class KoLeo(Loss):
    """Compute minus the log of the distance to the nearest neighbour, Kozachenko & Leonenko's estimate of the entropy.

    With z the unit rows of all ranks,

        loss_i = −log(min_{j≠i} ‖z_i − z_j‖ + ε)

    A single row has no neighbour and no loss; of neighbours at equal distances the first gets the gradient; equal rows have
    none. It regularises another loss: DINOv2 adds 0.1 times it, on the class tokens of each large crop by itself. DINOv2
    and lightly look for the neighbour on the own process only, and add ε to each coordinate, too.

    Called as ``loss(embeddings)``:

    - embeddings: [n, d], n may differ between ranks.

    Args:
        eps: ε > 0.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' rows, ``"sum"``, or ``"none"`` for the local rows, [n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: an eps that is not positive, or what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> KoLeo()(torch.eye(3))   # −log √2
        tensor(-0.3466)

    Source: Sablayrolles et al. 2019, https://arxiv.org/abs/1806.03198
    """

    eps: float
    normalize: bool
    reduction: Reduction
    check_finite: bool

    def __init__(
        self, *, eps: float = 1e-08, normalize: bool = True, reduction: Reduction = "mean", check_finite: bool = True
    ) -> None: ...
    def __call__(self, embeddings: Float[Tensor, "n d"], *, world: World | None = None) -> Tensor: ...
