"""SINCERE: each positive is compared with the negatives only, never with the anchor's other positives."""

from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.engine.row_statistics import Rows
from contrastive_zoo.engine.rowwise import AnchorBlock
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.block_loss import Average, LabelledLoss, info_nce_per_positive, sum_over_labelled_anchors
from contrastive_zoo.loss_base.checks import word_problem
from contrastive_zoo.world import ALONE, World


@checked
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
    r"""Compute supervised InfoNCE revisited: the mean of the InfoNCE losses of an anchor's positives.

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
    return sum_over_labelled_anchors(
        "SINCERE", _block_losses, embeddings, labels, problem=_settings_problem(average), average=average,
        temperature=temperature, normalize=normalize, reduction=reduction, world=world,
    )  # fmt: skip


def _block_losses(block: AnchorBlock, temperature: Tensor, average: Average) -> Rows:
    return (yield from info_nce_per_positive(block.anchors @ block.candidates.T / temperature, block, average))


def _settings_problem(average: str) -> str | None:
    return word_problem("average", average, Average)


class SINCERE(LabelledLoss, function=sincere, block_function=_block_losses, check=_settings_problem): ...
