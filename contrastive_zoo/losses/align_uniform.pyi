# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.world import ALONE, World

def align_uniform(
    view1: Float[Tensor, "n d"],
    view2: Float[Tensor, "n d"],
    *,
    alpha: float = 2.0,
    t: float = 2.0,
    uniformity: float = 1.0,
    world: World = ALONE,
) -> Float[Tensor, ""]:
    """Compute the mean distance of partners plus the log of the mean Gaussian potential of all pairs; it has no unit.

    With a, b the unit rows of the two views of all ranks,

        loss = mean_i ‖a_i − b_i‖^α  +  λ/2 Σ_{z∈{a,b}} log mean_{i≠j} exp(−t ‖z_i − z_j‖²)

    On the sphere ‖z_i − z_j‖² = 2 − 2 z_i·z_j, so the second term is a log-sum-exp of similarities, 0 without a pair.
    A zero row counts there as a point at right angles to all others.
    α = t = 2 and λ = 1 are the paper's defaults; lightly's HypersphereLoss has t = 1.

    Args:
        view1: a, [n, d]; n may differ between ranks.
        view2: b, [n, d]; rows of one sample stand at the same index.
        alpha: α ≥ 1.
        t: t > 0, an inverse squared distance.
        uniformity: λ, the second term's weight.
        world: the ranks that share the batch.

    Raises:
        ValueError: an alpha below 1, a t that is not positive, a uniformity that is not finite, or what any
            :class:`Loss` refuses.

    Examples:
        >>> align_uniform(torch.eye(2), torch.eye(2))   # log exp(−2 · 2)
        tensor(-4.)

    Source: Wang & Isola 2020, §4.1, https://arxiv.org/abs/2005.10242
    """

class AlignUniform(Loss):
    """Compute the mean distance of partners plus the log of the mean Gaussian potential of all pairs; it has no unit.

    With a, b the unit rows of the two views of all ranks,

        loss = mean_i ‖a_i − b_i‖^α  +  λ/2 Σ_{z∈{a,b}} log mean_{i≠j} exp(−t ‖z_i − z_j‖²)

    On the sphere ‖z_i − z_j‖² = 2 − 2 z_i·z_j, so the second term is a log-sum-exp of similarities, 0 without a pair.
    A zero row counts there as a point at right angles to all others.
    α = t = 2 and λ = 1 are the paper's defaults; lightly's HypersphereLoss has t = 1.

    Called as ``loss(view1, view2)``:

    - view1: a, [n, d]; n may differ between ranks.
    - view2: b, [n, d]; rows of one sample stand at the same index.

    Args:
        alpha: α ≥ 1.
        t: t > 0, an inverse squared distance.
        uniformity: λ, the second term's weight.
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: an alpha below 1, a t that is not positive, a uniformity that is not finite, or what any
            :class:`Loss` refuses.

    Examples:
        >>> AlignUniform()(torch.eye(2), torch.eye(2))   # log exp(−2 · 2)
        tensor(-4.)

    Source: Wang & Isola 2020, §4.1, https://arxiv.org/abs/2005.10242
    """

    alpha: float
    t: float
    uniformity: float
    check_finite: bool

    def __init__(
        self, *, alpha: float = 2.0, t: float = 2.0, uniformity: float = 1.0, check_finite: bool = True
    ) -> None: ...
    def __call__(
        self, view1: Float[Tensor, "n d"], view2: Float[Tensor, "n d"], *, world: World | None = None
    ) -> Tensor: ...
