# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float, Int
from torch import Tensor, nn

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.block_loss import LabelledLoss
from contrastive_zoo.losses.siglip import SigLIP
from contrastive_zoo.world import ALONE, World

def sup_sigmoid(
    embeddings: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    temperature: float | Tensor = 0.1,
    logit_bias: float | Tensor = -10.0,
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    """Compute SigLIP's binary cross-entropy over all pairs of labelled rows.

    With z the unit rows of all ranks, y_ij = 1 for equal labels and −1 otherwise,

        loss = −1/N · Σ_i Σ_{j≠i} log σ( y_ij · (z_i·z_j / t + b) )

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] integers.
        temperature: t > 0, dimensionless; a tensor is learnable.
        logit_bias: b; a tensor is learnable.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' rows (nats per row), ``"sum"``, or ``"none"`` for the local rows, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: a bias that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])   # (2 log(1 + e⁻¹) + 4 log 2) / 3
        >>> sup_sigmoid(z, torch.tensor([0, 0, 1]), temperature=1.0, logit_bias=0.0)
        tensor(1.1330)

    Source: Zhai et al. 2023, §3.2, with z_ij from labels, https://arxiv.org/abs/2303.15343
    """

class SupSigmoid(SigLIP, LabelledLoss):
    """Compute SigLIP's binary cross-entropy over all pairs of labelled rows.

    With z the unit rows of all ranks, y_ij = 1 for equal labels and −1 otherwise,

        loss = −1/N · Σ_i Σ_{j≠i} log σ( y_ij · (z_i·z_j / t + b) )

    Temperature and bias are learnable; the settings are their initial values.

    Called as ``loss(embeddings, labels)``:

    - embeddings: [n, d], n may differ between ranks.
    - labels: [n] integers.

    Args:
        temperature: t > 0, dimensionless; a tensor is learnable.
        logit_bias: b; a tensor is learnable.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' rows (nats per row), ``"sum"``, or ``"none"`` for the local rows, [n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: a bias that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])   # (2 log(1 + e⁻¹) + 4 log 2) / 3
        >>> SupSigmoid(temperature=1.0, logit_bias=0.0)(z, torch.tensor([0, 0, 1])).detach()
        tensor(1.1330)

    Source: Zhai et al. 2023, §3.2, with z_ij from labels, https://arxiv.org/abs/2303.15343
    """

    temperature: float | Tensor | nn.Module
    logit_bias: float | Tensor
    normalize: bool
    reduction: Reduction
    check_finite: bool

    def __init__(
        self,
        *,
        temperature: float | Tensor | nn.Module = 0.1,
        logit_bias: float | Tensor = -10.0,
        normalize: bool = True,
        reduction: Reduction = "mean",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self, embeddings: Float[Tensor, "n d"], labels: Int[Tensor, " n"] | None = None, *, world: World | None = None
    ) -> Tensor: ...
