"""Histogram loss: the probability that a random negative pair is more similar than a random positive pair."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo import devices
from contrastive_zoo.collectives import all_gather, gather_rows, sum_over_ranks
from contrastive_zoo.engine.anchor_block import BatchLayout
from contrastive_zoo.engine.dense_mode import is_dense
from contrastive_zoo.engine.precision import matmul, without_autocast
from contrastive_zoo.engine.rowwise import AnchorBlock, sum_over_anchors
from contrastive_zoo.engine.tiling import row_blocks
from contrastive_zoo.loss_base.argument_types import checked
from contrastive_zoo.loss_base.block_loss import BlockLoss
from contrastive_zoo.loss_base.checks import bins_problem
from contrastive_zoo.loss_base.distances import row_sums
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.preparation import begin_labelled
from contrastive_zoo.world import ALONE, Shards, World


@checked
def histogram(
    embeddings: Float[Tensor, "n d"],
    labels: Int[Tensor, " n"] | None = None,
    *,
    num_bins: int = 100,
    world: World = ALONE,
) -> Float[Tensor, ""]:
    r"""Compute the overlap of the histograms of positive and of negative similarities of unit rows.

    With h⁺ and h⁻ the histograms of s_ij = z_i·z_j over all positive and all negative pairs of all ranks, at R + 1 nodes
    from −1 to 1, where a pair is shared linearly between its two nearest nodes,

        loss = Σ_r h⁻_r Σ_{q≤r} h⁺_q

    which is 0 without a positive or a negative pair. Two passes over the pairs: the first sums histograms over ranks,
    the second takes the gradient, with memory linear in N. pytorch-metric-learning's HistogramLoss leaves out negative pairs
    of two rows that both have no positive.

    Args:
        embeddings: [n, d], n may differ between ranks.
        labels: [n] integers.
        num_bins: R, the number of steps; the paper finds little effect between 100 and 200.
        world: the ranks that share the batch.

    Raises:
        ValueError: num_bins below 1, or what any :class:`Loss` refuses.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
        >>> histogram(z, torch.tensor([0, 0, 1]), num_bins=2)   # positives at 0; negatives at 0 and 1
        tensor(1.)
        >>> histogram(z, torch.tensor([0, 1, 0]), num_bins=2)   # positives at 1, negatives at 0
        tensor(0.)

    Source: Ustinova & Lempitsky 2016, https://arxiv.org/abs/1611.00822
    """
    z, ids, shards = begin_labelled(
        "Histogram", embeddings, labels, problem=_settings_problem(num_bins), num_bins=num_bins, world=world
    )
    with torch.set_grad_enabled(is_dense() and torch.is_grad_enabled()):
        positives, negatives = _densities(z, ids, num_bins, shards, world)
        below = positives.cumsum(0)
        value = (negatives * below).sum()
    if is_dense():
        return value
    # the loss is linear in either histogram: its gradient is that of the means of two fixed functions of similarity
    above = negatives.flip(0).cumsum(0).flip(0)
    loss = BlockLoss(_interpolated, of_negatives=below, of_positives=above)
    loss.terms = 2
    linear = sum_over_anchors(loss, z, ids, shards=shards, world=world)
    return value + (linear - linear.detach())


def _settings_problem(num_bins: int) -> str | None:
    return bins_problem(num_bins)


class Histogram(Loss, function=histogram, check=_settings_problem): ...


@without_autocast
def _densities(z: Tensor, ids: Tensor, num_bins: int, shards: Shards, world: World) -> tuple[Tensor, Tensor]:
    """Return the histograms of positive and of negative pairs of all ranks, each with sum 1, or 0 without a pair."""
    candidates = all_gather(z, shards=shards, process_group=world)
    layout = BatchLayout(ids, gather_rows(ids, shards, world), (), shards, world, shards.start, None)
    total = z.new_zeros(2, num_bins + 1)
    for rows in row_blocks(len(z), 4 * len(candidates), z.dtype):
        block = layout.block(rows, z[rows], candidates)
        lower, share = _nodes(matmul(block.anchors, candidates.T), num_bins)
        nodes, weights = torch.stack([lower, lower + 1]), torch.stack([1 - share, share])
        found = [_sums_by_node(nodes, weights, mask, num_bins) for mask in (block.positive, block.negative)]
        total = total + torch.stack(found)
    total = sum_over_ranks(total, gradient="complete", world=world)
    pairs = total.detach().sum(1, keepdim=True)
    positives, negatives = total / pairs.where(pairs > 0, 1)
    return positives, negatives


def _nodes(similarity: Tensor, num_bins: int) -> tuple[Tensor, Tensor]:
    """Return the node below each similarity, and the share of the next one."""
    position = (similarity + 1) * (num_bins / 2)
    lower = position.detach().long().clamp_(0, num_bins - 1)
    return lower, position - lower


def _sums_by_node(nodes: Tensor, weights: Tensor, mask: Tensor, num_bins: int) -> Tensor:
    if devices.on_cpu(mask):
        nodes, weights = nodes[:, mask], weights[:, mask]
    else:  # the number of pairs would have to be read
        weights = weights.where(mask, 0)
    return weights.new_zeros(num_bins + 1).index_add(0, nodes.flatten(), weights.flatten())


def _interpolated(block: AnchorBlock, of_negatives: Tensor, of_positives: Tensor) -> tuple[Tensor, Tensor]:
    lower, share = _nodes(block.anchors @ block.candidates.T, len(of_negatives) - 1)
    at_pairs = [(1 - share) * table[lower] + share * table[lower + 1] for table in (of_positives, of_negatives)]
    positive, negative = (x.where(mask, 0) for x, mask in zip(at_pairs, (block.positive, block.negative), strict=True))
    return row_sums(positive, negative), row_sums(block.positive, block.negative)
