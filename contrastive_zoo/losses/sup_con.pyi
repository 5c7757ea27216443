# Written by tools/stubs.py from the module beside it: `make stubs`.
from typing import Literal

from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.loss_base.block_loss import LabelledLoss
from contrastive_zoo.world import ALONE, World

Variant = Literal["out", "in"]
ContrastMode = Literal["all", "one"]

def sup_con(
    embeddings: Float[Tensor, "n d"] | Float[Tensor, "n v d"],
    labels: Int[Tensor, " n"] | None = None,
    mask: Shaped[Tensor, "n N"] | None = None,
    *,
    temperature: float | Tensor = 0.1,
    variant: Variant = "out",
    contrast_mode: ContrastMode = "all",
    base_temperature: float | None = None,
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

    The authors' code has temperature 0.07 and multiplies the loss by t / 0.07: ``temperature=0.07,
    base_temperature=0.07``. It counts anchors without a positive in the mean, this loss does not.

    Args:
        embeddings: [n, d], n may differ between ranks; or [n, v, d], v views of each sample, the same v everywhere.
        labels: [n] integers; None with views makes each sample a class of its own.
        mask: [n, N], in place of labels: whether each of the N samples of all ranks, in rank order, is a positive of each
            local sample. A row is never its own positive.
        temperature: t > 0, dimensionless; a tensor is learnable.
        variant: ``"out"``, the paper's L_out, or ``"in"``, its L_in.
        contrast_mode: ``"all"`` views are anchors, or the first (``"one"``); candidates are always all views.
        base_temperature: t₀; multiplies the loss by t / t₀, without gradient. None leaves this factor out.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over anchors with a positive (nats, 0 without any), ``"sum"``, or ``"none"`` for the local
            anchors, [n], or [n · v] sample by sample.
        world: the ranks that share the batch.

    Raises:
        ValueError: an unknown variant or contrast mode, labels together with a mask, a mask that does not have a column for
            each sample of all ranks, or what any :class:`Loss` refuses.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> sup_con(z, torch.tensor([0, 0, 1]), temperature=1.0)   # log(e + 1) − 1; row 2 has no positive
        tensor(0.3133)
        >>> sup_con(torch.eye(2)[:, None].repeat(1, 2, 1), temperature=1.0)   # two samples, two views: log(e + 2) − 1
        tensor(0.5514)

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

    The authors' code has temperature 0.07 and multiplies the loss by t / 0.07: ``temperature=0.07,
    base_temperature=0.07``. It counts anchors without a positive in the mean, this loss does not.

    Called as ``loss(embeddings, labels, mask)``:

    - embeddings: [n, d], n may differ between ranks; or [n, v, d], v views of each sample, the same v everywhere.
    - labels: [n] integers; None with views makes each sample a class of its own.
    - mask: [n, N], in place of labels: whether each of the N samples of all ranks, in rank order, is a positive of each
      local sample. A row is never its own positive.

    Args:
        temperature: t > 0, dimensionless; a tensor is learnable.
        variant: ``"out"``, the paper's L_out, or ``"in"``, its L_in.
        contrast_mode: ``"all"`` views are anchors, or the first (``"one"``); candidates are always all views.
        base_temperature: t₀; multiplies the loss by t / t₀, without gradient. None leaves this factor out.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over anchors with a positive (nats, 0 without any), ``"sum"``, or ``"none"`` for the local
            anchors, [n], or [n · v] sample by sample.
        check_finite: whether NaN and infinite embeddings are refused.

    Raises:
        ValueError: an unknown variant or contrast mode, labels together with a mask, a mask that does not have a column for
            each sample of all ranks, or what any :class:`Loss` refuses.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> SupCon(temperature=1.0)(z, torch.tensor([0, 0, 1]))   # log(e + 1) − 1; row 2 has no positive
        tensor(0.3133)
        >>> SupCon(temperature=1.0)(torch.eye(2)[:, None].repeat(1, 2, 1))   # two samples, two views: log(e + 2) − 1
        tensor(0.5514)

    Source: Khosla et al. 2020, eq. 2 (L_out) and 3 (L_in), https://arxiv.org/abs/2004.11362
    """

    temperature: float | Tensor | nn.Module
    variant: Variant
    contrast_mode: ContrastMode
    base_temperature: float | None
    normalize: bool
    reduction: Reduction
    check_finite: bool

    def __init__(
        self,
        *,
        temperature: float | Tensor | nn.Module = 0.1,
        variant: Variant = "out",
        contrast_mode: ContrastMode = "all",
        base_temperature: float | None = None,
        normalize: bool = True,
        reduction: Reduction = "mean",
        check_finite: bool = True,
    ) -> None: ...
    def __call__(
        self,
        embeddings: Float[Tensor, "n d"] | Float[Tensor, "n v d"],
        labels: Int[Tensor, " n"] | None = None,
        mask: Shaped[Tensor, "n N"] | None = None,
        *,
        world: World | None = None,
    ) -> Tensor: ...
