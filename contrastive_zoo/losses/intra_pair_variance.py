"""Intra-pair variance: similarities of positives, and of negatives, close to their means."""

import torch
from torch import Tensor

from contrastive_zoo.engine.anchor_block import AnchorBlock, class_numbers
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.block_loss import BlockLoss
from contrastive_zoo.engine.pairwise import dot_products, row_sums
from contrastive_zoo.engine.rowwise import reduce_rows
from contrastive_zoo.loss_base.families import LabelledLoss
from contrastive_zoo.loss_base.settings import Number, Reduction


class IntraPairVariance(LabelledLoss):
    r"""Compute squared hinges of similarities around the mean of all positives, and of all negatives.

    With μ⁺, μ⁻ the means of s_ij = z_i·z_j over the positive and over the negative pairs of all ranks,

        loss = mean_{i, p∈P(i)} max(0, (1 − ε⁺) μ⁺ − s_ip)²  +  mean_{i, n∈N(i)} max(0, s_in − (1 + ε⁻) μ⁻)²

    over ordered pairs; an empty mean is 0. The means have gradients, too. They come from sums over classes, without a
    further pass over the pairs. Equal to pytorch-metric-learning's IntraPairVarianceLoss. It regularises another loss.

    Called as ``loss(embeddings, labels)``:

    - embeddings: [n, d], n may differ between ranks.
    - labels: [n] integers.

    Args:
        pos_eps: ε⁺.
        neg_eps: ε⁻.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over pairs, ``"sum"``, or ``"none"`` for sums over the pairs of the local anchors, [n].
        check_finite: whether NaN and infinite values are refused.

    Raises:
        ValueError: an ε that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
        >>> IntraPairVariance(pos_eps=0.0, neg_eps=0.0)(z, torch.tensor([0, 0, 0, 1]))   # (⅓)²·⅔ and (⅓)²·⅔
        tensor(0.1481)

    Source: Yu & Tao 2019, https://openaccess.thecvf.com/content_ICCV_2019/html/Yu_Deep_Metric_Learning_With_Tuplet_Margin_Loss_ICCV_2019_paper.html
    """

    pos_eps: Number = 0.01
    neg_eps: Number = 0.01
    normalize: bool = True
    reduction: Reduction = "mean"

    def compute(self, batch: Batch) -> Tensor:
        z = batch.prepared(batch.rows["embeddings"], normalize=self.normalize)
        ids, settings = batch.int64(batch.rows["labels"]), batch.settings
        positive, negative = _mean_similarities(batch, z, ids)
        loss = BlockLoss(_hinges, lowest=(1 - settings.pos_eps) * positive, highest=(1 + settings.neg_eps) * negative)
        loss.terms = 2
        return reduce_rows(batch, loss, z, ids, reduction=self.reduction)


def _mean_similarities(batch: Batch, z: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean similarities of positive and of negative pairs; each class's pairs are the square of its sum."""
    index, counts = class_numbers(batch.gathered(ids))
    sums = z.new_zeros(len(counts), z.shape[1]).index_add(0, index[batch.samples.local], z)
    own = z.new_zeros(1, z.shape[1]) + z.square().sum() / z.shape[1]  # rides along as a row
    total = batch.sum(torch.cat([sums, own]), gradient="complete")
    sums, squares = total[:-1], total[-1].sum()
    same_class = sums.square().sum()
    positives, pairs = (counts * (counts - 1)).sum(), counts.sum().square()
    negatives, all_pairs = pairs - counts.square().sum(), sums.sum(0).square().sum()
    return (same_class - squares) / positives.clamp(min=1), (all_pairs - same_class) / negatives.clamp(min=1)


def _hinges(block: AnchorBlock, lowest: Tensor, highest: Tensor) -> tuple[Tensor, Tensor]:
    similarity = dot_products(block.anchors, block.candidates)
    low = (lowest - similarity).relu().square().where(block.positive, 0)
    high = (similarity - highest).relu().square().where(block.negative, 0)
    return row_sums(low, high), row_sums(block.positive, block.negative)
