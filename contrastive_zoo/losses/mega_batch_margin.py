"""Mega-batch margin: every positive pair within one margin, the hardest negative of the batch beyond another."""

from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.engine.anchor_block import AnchorBlock
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.block_loss import BlockLoss
from contrastive_zoo.engine.masked import masked_max
from contrastive_zoo.engine.pairwise import dot_products
from contrastive_zoo.engine.rowwise import reduce_rows
from contrastive_zoo.loss_base.inputs import Inputs
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.settings import Number, Reduction
from contrastive_zoo.ranks.row_checks import views_problem


class MegaBatchMargin(Loss):
    r"""Compute hinges on each query's own key and on the most similar other key of all ranks.

    With s_ij = q_i·k_j of unit rows,

        loss_i = max(0, m⁺ − s_ii)  +  max(0, max_{j≠i} s_ij − m⁻)

    A single pair has no second term. Equal maxima share the gradient.

    Called as ``loss(queries, keys)``:

    - queries: [n, d], n may differ between ranks.
    - keys: [n, d], row i belongs to row i of queries.

    Args:
        positive_margin: m⁺, the similarity from which on a pair has no loss.
        negative_margin: m⁻, the similarity up to which a negative has no loss.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over all ranks' queries, ``"sum"``, or ``"none"`` for the local queries, [n].
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: a margin that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> import torch
        >>> q, k = torch.eye(2), torch.tensor([[0.6, 0.8], [0.8, 0.6]])
        >>> MegaBatchMargin()(q, k)   # 0.8 − 0.6 and 0.8 − 0.3, twice
        tensor(0.7000)

    Source: Wieting & Gimpel 2018, https://arxiv.org/abs/1711.05732
    """

    positive_margin: Number = 0.8
    negative_margin: Number = 0.3
    normalize: bool = True
    reduction: Reduction = "mean"

    def inputs(self, queries: Float[Tensor, "n d"], keys: Float[Tensor, "n d"]) -> Inputs:
        return Inputs({"view 0": queries, "view 1": keys}, views_problem((queries, keys)))

    def compute(self, batch: Batch) -> Tensor:
        q, k = (batch.prepared(x, normalize=self.normalize) for x in batch.rows.values())
        pairs, settings = batch.indices(), batch.settings
        loss = BlockLoss(_hinges, positive_margin=settings.positive_margin, negative_margin=settings.negative_margin)
        return reduce_rows(batch, loss, q, pairs, candidates=k, candidate_ids=pairs, reduction=self.reduction)


def _hinges(block: AnchorBlock, positive_margin: float, negative_margin: float) -> tuple[Tensor, Tensor]:
    similarity = dot_products(block.anchors, block.candidates)
    own = similarity.where(block.positive, 0).sum(1)
    hardest = masked_max(similarity, block.negative)  # −inf without a negative
    return (positive_margin - own).relu() + (hardest - negative_margin).relu(), block.positive.any(1)
