# Written by tools/stubs.py from the module beside it: `make stubs`.
from jaxtyping import Float, Int
from torch import Tensor, nn

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.block_loss import Average, LabelledLoss
from contrastive_zoo.world import ALONE, World

def sincere(
    embeddings: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    temperature: float | Tensor = 0.1,
    average: Average = "anchors",
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    """Compute supervised InfoNCE revisited: the mean of the InfoNCE losses of an anchor's positives.

    With z the unit rows of all ranks, P(i) the other rows with i's label and N(i) those with another,

        loss_i = mean_{p∈P(i)} log( 1 + Σ_{n∈N(i)} exp((z_i·z_n − z_i·z_p) / t) )

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] integers.
        temperature: t > 0, dimensionless; a tensor is learnable.
        average: ``"anchors"``, equal weights of anchors with a positive, as in the authors' code; or ``"pairs"`` (i, p),
            which is pytorch-metric-learning's NTXentLoss on labelled rows, with memory linear in N.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' anchors or pairs (nats, 0 without any), ``"sum"``, or ``"none"`` for the local
            anchors, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: an unknown average, or what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> sincere(torch.eye(2)[[0, 0, 1]], torch.tensor([0, 0, 1]), temperature=1.0)   # log(1 + e⁻¹); row 2 has none
        tensor(0.3133)

    Source: Feeney and Hughes 2023, https://arxiv.org/abs/2309.14277
    """

class SINCERE(LabelledLoss):
    """Compute supervised InfoNCE revisited: the mean of the InfoNCE losses of an anchor's positives.

    With z the unit rows of all ranks, P(i) the other rows with i's label and N(i) those with another,

        loss_i = mean_{p∈P(i)} log( 1 + Σ_{n∈N(i)} exp((z_i·z_n − z_i·z_p) / t) )

    Called as ``loss(embeddings, labels)``:

    - embeddings: [n, d], n may differ between ranks.
    - labels: [n] integers.

    Args:
        temperature: t > 0, dimensionless; a tensor is learnable.
        average: ``"anchors"``, equal weights of anchors with a positive, as in the authors' code; or ``"pairs"`` (i, p),
            which is pytorch-metric-learning's NTXentLoss on labelled rows, with memory linear in N.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' anchors or pairs (nats, 0 without any), ``"sum"``, or ``"none"`` for the local
            anchors, [n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: an unknown average, or what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> SINCERE(temperature=1.0)(torch.eye(2)[[0, 0, 1]], torch.tensor([0, 0, 1]))   # log(1 + e⁻¹); row 2 has none
        tensor(0.3133)

    Source: Feeney and Hughes 2023, https://arxiv.org/abs/2309.14277
    """

    temperature: float | Tensor | nn.Module
    average: Average
    normalize: bool
    reduction: Reduction
    check_finite: bool

    def __init__(
        self,
        *,
        temperature: float | Tensor | nn.Module = 0.1,
        average: Average = "anchors",
        normalize: bool = True,
        reduction: Reduction = "mean",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self, embeddings: Float[Tensor, "n d"], labels: Int[Tensor, " n"] | None = None, *, world: World | None = None
    ) -> Tensor: ...
