# Written by tools/stubs.py from the module beside it: `make stubs`.
from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor, nn

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.block_loss import LabelledLoss
from contrastive_zoo.world import ALONE, World

Variant = Literal["out", "in"]

def sup_con(
    embeddings: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    temperature: float | Tensor = 0.1,
    variant: Variant = "out",
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    """Compute the supervised contrastive loss, with positives outside the logarithm (or inside).

    With z the unit rows of all ranks and P(i) the other rows with i's label,

        loss_i = log Σ_{k≠i} exp(z_i·z_k / t)  −  mean_{p∈P(i)} z_i·z_p / t

    averaged over the anchors that have a positive. Dense: ``-(log_softmax((z @ z.T / t).fill_diagonal_(-inf), 1) *
    positive).sum(1) / positive.sum(1)``. Positives need no mask: the sum of
    their logits is one dot product with the sum of the class.

    The variant ``"in"``, which performs worse in the paper, averages probabilities, not their logarithms. Its last term is
    log mean_{p∈P(i)} exp(z_i·z_p / t).

    Args:
        embeddings: [n, d], n may differ between ranks. Several views of a sample are several rows.
        labels: [n] integers.
        temperature: t > 0, dimensionless; a tensor is learnable.
        variant: ``"out"``, the paper's L_out, or ``"in"``, its L_in.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over anchors with a positive (nats, 0 without any), ``"sum"``, or ``"none"`` for the local
            anchors, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: an unknown variant, or what any :class:`Loss` refuses.

    Example:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> sup_con(z, torch.tensor([0, 0, 1]), temperature=1.0)   # log(e + 1) − 1; row 2 has no positive
        tensor(0.3133)

    Source: Khosla et al. 2020, eq. 2 (L_out) and 3 (L_in), https://arxiv.org/abs/2004.11362
    """

class SupCon(LabelledLoss):
    """Compute the supervised contrastive loss, with positives outside the logarithm (or inside).

    With z the unit rows of all ranks and P(i) the other rows with i's label,

        loss_i = log Σ_{k≠i} exp(z_i·z_k / t)  −  mean_{p∈P(i)} z_i·z_p / t

    averaged over the anchors that have a positive. Dense: ``-(log_softmax((z @ z.T / t).fill_diagonal_(-inf), 1) *
    positive).sum(1) / positive.sum(1)``. Positives need no mask: the sum of
    their logits is one dot product with the sum of the class.

    The variant ``"in"``, which performs worse in the paper, averages probabilities, not their logarithms. Its last term is
    log mean_{p∈P(i)} exp(z_i·z_p / t).

    Called as ``loss(embeddings, labels)``:

    - embeddings: [n, d], n may differ between ranks. Several views of a sample are several rows.
    - labels: [n] integers.

    Args:
        temperature: t > 0, dimensionless; a tensor is learnable.
        variant: ``"out"``, the paper's L_out, or ``"in"``, its L_in.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over anchors with a positive (nats, 0 without any), ``"sum"``, or ``"none"`` for the local
            anchors, [n].
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: an unknown variant, or what any :class:`Loss` refuses.

    Example:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> SupCon(temperature=1.0)(z, torch.tensor([0, 0, 1]))   # log(e + 1) − 1; row 2 has no positive
        tensor(0.3133)

    Source: Khosla et al. 2020, eq. 2 (L_out) and 3 (L_in), https://arxiv.org/abs/2004.11362
    """

    temperature: float | Tensor | nn.Module
    variant: Variant
    normalize: bool
    reduction: Reduction
    check_finite: bool

    def __init__(
        self,
        *,
        temperature: float | Tensor | nn.Module = 0.1,
        variant: Variant = "out",
        normalize: bool = True,
        reduction: Reduction = "mean",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self, embeddings: Float[Tensor, "n d"], labels: Int[Tensor, " n"] | None = None, *, world: World | None = None
    ) -> Tensor: ...
