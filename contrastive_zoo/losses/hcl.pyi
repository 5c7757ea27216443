# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float
from torch import Tensor, nn

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.world import ALONE, World

def hcl(
    view1: Float[Tensor, "n d"],
    view2: Float[Tensor, "n d"],
    *,
    temperature: float | Tensor = 0.5,
    tau_plus: float = 0.1,
    beta: float = 1.0,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    """Compute the contrastive loss of two views with an estimate of the true negatives that weights hard ones more.

    With x_ik = z_i·z_k / t the logits of unit rows, p the other view of row i, its M = 2N − 2 negatives N(i),

        H_i = Σ_{k∈N(i)} w_ik exp(x_ik),       w_ik = M exp(β x_ik) / Σ_{l∈N(i)} exp(β x_il)
        G_i = max( (H_i − τ⁺ M exp(x_ip)) / (1 − τ⁺),  M exp(−1/t) )
        loss = mean_i log(1 + G_i / exp(x_ip))

    β = 0 is the debiased loss; with τ⁺ = 0, too, NT-Xent. Equal to the authors' code on one process; computed in logarithms.

    Args:
        view1: [n, d], n may differ between ranks; rows are normalised, which the bound exp(−1/t) needs.
        view2: [n, d], row i belongs to row i of view1.
        temperature: t > 0, dimensionless; a tensor is learnable.
        tau_plus: τ⁺ in [0, 1), the chance that a negative is of the anchor's class.
        beta: β ≥ 0; a larger β weights hard negatives more.
        reduction: ``"mean"`` over all ranks' rows (nats per anchor, 0 for one sample), ``"sum"``, or ``"none"`` for the
            local rows, view after view, [2n].
        world: the ranks that share the batch.

    Raises:
        ValueError: tau_plus or beta out of range, or what any :class:`Loss` refuses.

    Examples:
        >>> hcl(torch.eye(2), torch.eye(2), temperature=1.0, tau_plus=0.0)   # log(1 + 2/e)
        tensor(0.5514)

    Source: Robinson et al. 2021, §3, https://arxiv.org/abs/2010.04592
    """

def debiased(
    view1: Float[Tensor, "n d"],
    view2: Float[Tensor, "n d"],
    *,
    temperature: float | Tensor = 0.5,
    tau_plus: float = 0.1,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    """Compute the contrastive loss of two views, corrected for negatives of the anchor's class: :func:`hcl` with β = 0.

    With x_ik = z_i·z_k / t the logits of unit rows, p the other view of row i, its M = 2N − 2 negatives N(i),

        G_i = max( (Σ_{k∈N(i)} exp(x_ik) − τ⁺ M exp(x_ip)) / (1 − τ⁺),  M exp(−1/t) )
        loss = mean_i log(1 + G_i / exp(x_ip))

    Args:
        view1: [n, d], n may differ between ranks; rows are normalised.
        view2: [n, d], row i belongs to row i of view1.
        temperature: t > 0, dimensionless; a tensor is learnable.
        tau_plus: τ⁺ in [0, 1), the chance that a negative is of the anchor's class.
        reduction: ``"mean"`` over all ranks' rows (nats per anchor, 0 for one sample), ``"sum"``, or ``"none"`` for the
            local rows, view after view, [2n].
        world: the ranks that share the batch.

    Raises:
        ValueError: as :func:`hcl`.

    Examples:
        >>> debiased(torch.eye(2), torch.eye(2), temperature=1.0)   # log(1 + (2 − 0.2e) / 0.9e)
        tensor(0.4671)

    Source: Chuang et al. 2020, https://arxiv.org/abs/2007.00224
    """

class HCL(Loss):
    """Compute the contrastive loss of two views with an estimate of the true negatives that weights hard ones more.

    With x_ik = z_i·z_k / t the logits of unit rows, p the other view of row i, its M = 2N − 2 negatives N(i),

        H_i = Σ_{k∈N(i)} w_ik exp(x_ik),       w_ik = M exp(β x_ik) / Σ_{l∈N(i)} exp(β x_il)
        G_i = max( (H_i − τ⁺ M exp(x_ip)) / (1 − τ⁺),  M exp(−1/t) )
        loss = mean_i log(1 + G_i / exp(x_ip))

    β = 0 is the debiased loss; with τ⁺ = 0, too, NT-Xent. Equal to the authors' code on one process; computed in logarithms.

    Called as ``loss(view1, view2)``:

    - view1: [n, d], n may differ between ranks; rows are normalised, which the bound exp(−1/t) needs.
    - view2: [n, d], row i belongs to row i of view1.

    Args:
        temperature: t > 0, dimensionless; a tensor is learnable.
        tau_plus: τ⁺ in [0, 1), the chance that a negative is of the anchor's class.
        beta: β ≥ 0; a larger β weights hard negatives more.
        reduction: ``"mean"`` over all ranks' rows (nats per anchor, 0 for one sample), ``"sum"``, or ``"none"`` for the
            local rows, view after view, [2n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: tau_plus or beta out of range, or what any :class:`Loss` refuses.

    Examples:
        >>> HCL(temperature=1.0, tau_plus=0.0)(torch.eye(2), torch.eye(2))   # log(1 + 2/e)
        tensor(0.5514)

    Source: Robinson et al. 2021, §3, https://arxiv.org/abs/2010.04592
    """

    temperature: float | Tensor | nn.Module
    tau_plus: float
    beta: float
    reduction: Reduction
    check_finite: bool

    def __init__(
        self,
        *,
        temperature: float | Tensor | nn.Module = 0.5,
        tau_plus: float = 0.1,
        beta: float = 1.0,
        reduction: Reduction = "mean",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self, view1: Float[Tensor, "n d"], view2: Float[Tensor, "n d"], *, world: World | None = None
    ) -> Tensor: ...

class Debiased(Loss):
    """Compute the contrastive loss of two views, corrected for negatives of the anchor's class: :func:`hcl` with β = 0.

    With x_ik = z_i·z_k / t the logits of unit rows, p the other view of row i, its M = 2N − 2 negatives N(i),

        G_i = max( (Σ_{k∈N(i)} exp(x_ik) − τ⁺ M exp(x_ip)) / (1 − τ⁺),  M exp(−1/t) )
        loss = mean_i log(1 + G_i / exp(x_ip))

    Called as ``loss(view1, view2)``:

    - view1: [n, d], n may differ between ranks; rows are normalised.
    - view2: [n, d], row i belongs to row i of view1.

    Args:
        temperature: t > 0, dimensionless; a tensor is learnable.
        tau_plus: τ⁺ in [0, 1), the chance that a negative is of the anchor's class.
        reduction: ``"mean"`` over all ranks' rows (nats per anchor, 0 for one sample), ``"sum"``, or ``"none"`` for the
            local rows, view after view, [2n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: as :func:`hcl`.

    Examples:
        >>> Debiased(temperature=1.0)(torch.eye(2), torch.eye(2))   # log(1 + (2 − 0.2e) / 0.9e)
        tensor(0.4671)

    Source: Chuang et al. 2020, https://arxiv.org/abs/2007.00224
    """

    temperature: float | Tensor | nn.Module
    tau_plus: float
    reduction: Reduction
    check_finite: bool

    def __init__(
        self,
        *,
        temperature: float | Tensor | nn.Module = 0.5,
        tau_plus: float = 0.1,
        reduction: Reduction = "mean",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self, view1: Float[Tensor, "n d"], view2: Float[Tensor, "n d"], *, world: World | None = None
    ) -> Tensor: ...
