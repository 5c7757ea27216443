"""Intra-pair variance: similarities of positives, and of negatives, close to their means."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.collectives import gather_rows, sum_over_ranks
from contrastive_zoo.engine.class_pairs import class_numbers
from contrastive_zoo.engine.pairwise import dot_products
from contrastive_zoo.engine.reduction import Reduction
from contrastive_zoo.engine.rowwise import AnchorBlock, sum_over_anchors
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.block_loss import BlockLoss
from contrastive_zoo.loss_base.checks import number_problem
from contrastive_zoo.loss_base.distances import row_sums
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.numbers import real
from contrastive_zoo.loss_base.preparation import begin_labelled
from contrastive_zoo.world import ALONE, Shards, World


@checked
def intra_pair_variance(
    embeddings: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    pos_eps: float = 0.01,
    neg_eps: float = 0.01,
    normalize: bool = True,
    reduction: Reduction = "mean",
    world: World = ALONE,
) -> Float[Tensor, "..."]:
    r"""Compute squared hinges of similarities around the mean of all positives, and of all negatives.

    With μ⁺, μ⁻ the means of s_ij = z_i·z_j over the positive and over the negative pairs of all ranks,

        loss = mean_{i, p∈P(i)} max(0, (1 − ε⁺) μ⁺ − s_ip)²  +  mean_{i, n∈N(i)} max(0, s_in − (1 + ε⁻) μ⁻)²

    over ordered pairs; an empty mean is 0. The means have gradients, too. They come from sums over classes, without a
    further pass over the pairs. Equal to pytorch-metric-learning's IntraPairVarianceLoss. It regularises another loss.

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] integers.
        pos_eps: ε⁺.
        neg_eps: ε⁻.
        normalize: normalise embeddings to unit length first.
        reduction: ``"mean"`` over pairs, ``"sum"``, or ``"none"`` for sums over the pairs of the local anchors, [n].
        world: the ranks that share the batch.

    Raises:
        ValueError: an ε that is not finite, or what any :class:`Loss` refuses.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
        >>> intra_pair_variance(z, torch.tensor([0, 0, 0, 1]), pos_eps=0.0, neg_eps=0.0)   # (⅓)²·⅔ and (⅓)²·⅔
        tensor(0.1481)

    Source: Yu & Tao 2019, https://openaccess.thecvf.com/content_ICCV_2019/html/Yu_Deep_Metric_Learning_With_Tuplet_Margin_Loss_ICCV_2019_paper.html
    """
    z, ids, shards = begin_labelled(
        "IntraPairVariance", embeddings, labels, problem=_settings_problem(pos_eps, neg_eps), normalize=normalize,
        reduction=reduction, pos_eps=pos_eps, neg_eps=neg_eps, world=world,
    )  # fmt: skip
    positive, negative = _mean_similarities(z, ids, shards, world)
    loss = BlockLoss(_hinges, lowest=(1 - real(pos_eps)) * positive, highest=(1 + real(neg_eps)) * negative)
    loss.terms = 2
    return sum_over_anchors(loss, z, ids, shards=shards, reduction=reduction, world=world)


def _settings_problem(pos_eps: float, neg_eps: float) -> str | None:
    return number_problem(pos_eps=pos_eps, neg_eps=neg_eps)


class IntraPairVariance(Loss, function=intra_pair_variance, check=_settings_problem): ...


def _mean_similarities(z: Tensor, ids: Tensor, shards: Shards, world: World) -> tuple[Tensor, Tensor]:
    """Return the mean similarities of positive and of negative pairs; each class's pairs are the square of its sum."""
    index, counts = class_numbers(gather_rows(ids, shards, world))
    sums = z.new_zeros(len(counts), z.shape[1]).index_add(0, index[shards.local], z)
    own = z.new_zeros(1, z.shape[1]) + z.square().sum() / z.shape[1]  # rides along as a row
    total = sum_over_ranks(torch.cat([sums, own]), gradient="complete", world=world)
    sums, squares = total[:-1], total[-1].sum()
    same_class = sums.square().sum()
    positives, pairs = (counts * (counts - 1)).sum(), counts.sum().square()
    negatives = pairs - counts.square().sum()
    return (same_class - squares) / positives.clamp(min=1), (sums.sum(0).square().sum() - same_class) / negatives.clamp(
        min=1
    )


def _hinges(block: AnchorBlock, lowest: Tensor, highest: Tensor) -> tuple[Tensor, Tensor]:
    similarity = dot_products(block.anchors, block.candidates)
    low = (lowest - similarity).relu().square().where(block.positive, 0)
    high = (similarity - highest).relu().square().where(block.negative, 0)
    return row_sums(low, high), row_sums(block.positive, block.negative)
