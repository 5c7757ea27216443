"""NCA: the probability that a neighbour, drawn by distance, is of the same class."""

from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.cross_entropy import cross_entropy
from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.engine.row_statistics import AnyOf, LogSumExp, Rows
from contrastive_zoo.engine.rowwise import AnchorBlock
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.block_loss import LabelledLoss, sum_over_labelled_anchors
from contrastive_zoo.world import ALONE, World


@checked
def nca(
    embeddings: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    temperature: float | Tensor = 1.0,
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Compute −log of the probability that a stochastic neighbour is of the anchor's class.

    With z the rows of all ranks, P(i) the other rows with i's label,

        loss_i = log Σ_{k≠i} exp(−‖z_i − z_k‖² / t)  −  log Σ_{p∈P(i)} exp(−‖z_i − z_p‖² / t)

    averaged over the anchors that have a positive, the paper's alternative to the sum of the probabilities. Equal to
    pytorch-metric-learning's NCALoss with ``softmax_scale=1/t``, which leaves out anchors whose probability underflows.

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] integers.
        temperature: t > 0, in units of squared distance; a tensor is learnable.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over anchors with a positive (nats, 0 without any), ``"sum"``, or ``"none"`` for the local
            anchors, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> nca(torch.eye(2)[[0, 0, 1]], torch.tensor([0, 0, 1]))   # log(1 + e⁻²); row 2 has no positive
        tensor(0.1269)

    Source: Goldberger et al. 2004, https://www.cs.toronto.edu/~hinton/absps/nca.pdf
    """
    return sum_over_labelled_anchors(
        "NCA",
        _neighbours,
        embeddings,
        labels,
        temperature=temperature,
        normalize=normalize,
        reduction=reduction,
        world=world,
    )


def _neighbours(block: AnchorBlock, temperature: Tensor) -> Rows:
    logits = (2 * block.anchors @ block.candidates.T - block.candidates.square().sum(1)) / temperature  # ‖z_i‖² cancels
    of_positives, of_negatives, valid = yield (
        LogSumExp(logits, block.positive, empty=0.0),
        LogSumExp(logits, block.negative),
        AnyOf(block.positive.any(1)),
    )
    return cross_entropy(of_positives, of_negatives), valid


class NCA(LabelledLoss, function=nca, block_function=_neighbours): ...
