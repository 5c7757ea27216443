# Written by tools/stubs.py from the module beside it: `make stubs`.
from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.world import ALONE, World

Denominators = Literal["joint", "per_view"]

def dcl(
    view1: Float[Tensor, "n d"],
    view2: Float[Tensor, "n d"],
    *,
    temperature: float | Tensor = 0.1,
    sigma: float | None = None,
    denominators: Denominators = "joint",
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    """Compute the decoupled contrastive loss of two views, with weighted positives if ``sigma`` is given (DCLW).

    With z the unit rows of both views of all ranks, p(i) the other view of row i, N(i) the rows of other samples and
    w = 1, or, weighted and held constant, w_i = 2 − exp(z_i·z_p / σ) / mean_j exp(z_j·z_p(j) / σ),

        loss = mean_i [ log Σ_{k∈N(i)} exp(z_i·z_k / t)  −  w_i · z_i·z_p / t ]

    Equal to lightly's DCLLoss and DCLWLoss on one process. On several ranks lightly's weights are relative to the local
    batch, these to the global batch. Older releases of lightly add the logarithms of the sums over each view:
    ``denominators="per_view"``.

    Args:
        view1: [n, d], n may differ between ranks.
        view2: [n, d], row i belongs to row i of view1.
        temperature: t > 0, dimensionless; a tensor is learnable.
        sigma: σ > 0, None for no weights.
        denominators: ``"joint"``, one sum over both views, as in the paper; ``"per_view"``, as in older releases of lightly.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' rows (nats per anchor, 0 for one sample), ``"sum"``, or ``"none"`` for the
            local rows, view after view, [2n].
        world: the ranks that share the batch.

    Raises:
        ValueError: a sigma that is not positive, unknown denominators, or what any :class:`Loss` refuses.

    Examples:
        >>> dcl(torch.eye(2), torch.eye(2), temperature=1.0)   # log 2 − 1
        tensor(-0.3069)

    Source: Yeh et al. 2021, §3, https://arxiv.org/abs/2110.06848
    """

class DCL(Loss):
    """Compute the decoupled contrastive loss of two views, with weighted positives if ``sigma`` is given (DCLW).

    With z the unit rows of both views of all ranks, p(i) the other view of row i, N(i) the rows of other samples and
    w = 1, or, weighted and held constant, w_i = 2 − exp(z_i·z_p / σ) / mean_j exp(z_j·z_p(j) / σ),

        loss = mean_i [ log Σ_{k∈N(i)} exp(z_i·z_k / t)  −  w_i · z_i·z_p / t ]

    Equal to lightly's DCLLoss and DCLWLoss on one process. On several ranks lightly's weights are relative to the local
    batch, these to the global batch. Older releases of lightly add the logarithms of the sums over each view:
    ``denominators="per_view"``.

    Called as ``loss(view1, view2)``:

    - view1: [n, d], n may differ between ranks.
    - view2: [n, d], row i belongs to row i of view1.

    Args:
        temperature: t > 0, dimensionless; a tensor is learnable.
        sigma: σ > 0, None for no weights.
        denominators: ``"joint"``, one sum over both views, as in the paper; ``"per_view"``, as in older releases of lightly.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' rows (nats per anchor, 0 for one sample), ``"sum"``, or ``"none"`` for the
            local rows, view after view, [2n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: a sigma that is not positive, unknown denominators, or what any :class:`Loss` refuses.

    Examples:
        >>> DCL(temperature=1.0)(torch.eye(2), torch.eye(2))   # log 2 − 1
        tensor(-0.3069)

    Source: Yeh et al. 2021, §3, https://arxiv.org/abs/2110.06848
    """

    temperature: float | Tensor | nn.Module
    sigma: float | None
    denominators: Denominators
    normalize: bool
    reduction: Reduction
    check_finite: bool

    def __init__(
        self,
        *,
        temperature: float | Tensor | nn.Module = 0.1,
        sigma: float | None = None,
        denominators: Denominators = "joint",
        normalize: bool = True,
        reduction: Reduction = "mean",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self, view1: Float[Tensor, "n d"], view2: Float[Tensor, "n d"], *, world: World | None = None
    ) -> Tensor: ...

class DCLW(DCL):
    """Compute the decoupled contrastive loss of two views, with weighted positives if ``sigma`` is given (DCLW).

    With z the unit rows of both views of all ranks, p(i) the other view of row i, N(i) the rows of other samples and
    w = 1, or, weighted and held constant, w_i = 2 − exp(z_i·z_p / σ) / mean_j exp(z_j·z_p(j) / σ),

        loss = mean_i [ log Σ_{k∈N(i)} exp(z_i·z_k / t)  −  w_i · z_i·z_p / t ]

    Equal to lightly's DCLLoss and DCLWLoss on one process. On several ranks lightly's weights are relative to the local
    batch, these to the global batch. Older releases of lightly add the logarithms of the sums over each view:
    ``denominators="per_view"``.

    This class has von Mises–Fisher weights on the positives by default: it is :class:`DCL` with ``sigma=0.5``.

    Called as ``loss(view1, view2)``:

    - view1: [n, d], n may differ between ranks.
    - view2: [n, d], row i belongs to row i of view1.

    Args:
        temperature: t > 0, dimensionless; a tensor is learnable.
        sigma: σ > 0, None for no weights.
        denominators: ``"joint"``, one sum over both views, as in the paper; ``"per_view"``, as in older releases of lightly.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' rows (nats per anchor, 0 for one sample), ``"sum"``, or ``"none"`` for the
            local rows, view after view, [2n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: a sigma that is not positive, unknown denominators, or what any :class:`Loss` refuses.

    Examples:
        >>> DCLW()(torch.eye(2), torch.eye(2)).equal(DCL(sigma=0.5)(torch.eye(2), torch.eye(2)))
        True

    Source: Yeh et al. 2021, §3, https://arxiv.org/abs/2110.06848
    """

    temperature: float | Tensor | nn.Module
    sigma: float
    denominators: Denominators
    normalize: bool
    reduction: Reduction
    check_finite: bool

    def __init__(
        self,
        *,
        temperature: float | Tensor | nn.Module = 0.1,
        sigma: float = 0.5,
        denominators: Denominators = "joint",
        normalize: bool = True,
        reduction: Reduction = "mean",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self, view1: Float[Tensor, "n d"], view2: Float[Tensor, "n d"], *, world: World | None = None
    ) -> Tensor: ...
