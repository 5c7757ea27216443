"""Sum the similarities of all pairs into histograms, block by block, with memory linear in N, and compare them."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine.anchor_block import AnchorBlock, BatchLayout
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.engine.block_loss import BlockLoss
from contrastive_zoo.engine.implementation import is_dense
from contrastive_zoo.engine.pairwise import row_sums
from contrastive_zoo.engine.precision import matmul, without_autocast
from contrastive_zoo.engine.rowwise import reduce_rows
from contrastive_zoo.engine.tiling import row_blocks
from contrastive_zoo.ranks import devices
from contrastive_zoo.ranks.collectives import all_gather


def histogram_overlap(
    batch: Batch, z: Float[Tensor, "n d"], ids: Int[Tensor, " n"], num_bins: int
) -> Float[Tensor, ""]:
    """Return the probability that a negative pair is more similar than a positive one: Σ_n h⁻_n Σ_{m≤n} h⁺_m."""
    with torch.set_grad_enabled(is_dense() and torch.is_grad_enabled()):
        positives, negatives = pair_histograms(batch, z, ids, num_bins)
        below = positives.cumsum(0)
        value = (negatives * below).sum()
    if is_dense():
        return value
    # the loss is linear in either histogram: its gradient is that of the means of two fixed functions of similarity
    above = negatives.flip(0).cumsum(0).flip(0)
    loss = BlockLoss(_interpolated, of_negatives=below, of_positives=above)
    loss.terms = 2
    linear = reduce_rows(batch, loss, z, ids)
    return value + (linear - linear.detach())


@without_autocast
def pair_histograms(
    batch: Batch, z: Float[Tensor, "n d"], ids: Int[Tensor, " n"], num_bins: int
) -> tuple[Float[Tensor, " nodes"], Float[Tensor, " nodes"]]:
    """Return the histograms of positive and of negative pairs of all ranks, each with sum 1, or 0 without a pair.

    ``z`` are the local unit rows; ``num_bins`` steps lead from −1 to 1.

    Examples:
        >>> from contrastive_zoo.ranks.world import Shards
        >>> z = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
        >>> batch = Batch({"embeddings": z}, {"embeddings": Shards((3,))})
        >>> pair_histograms(batch, z, torch.tensor([0, 0, 1]), 2)   # positives at 0; negatives at 0 and 1
        (tensor([0., 1., 0.]), tensor([0.0000, 0.5000, 0.5000]))
    """
    shards, world = batch.samples, batch.world
    candidates = all_gather(z, shards=shards, process_group=world)
    layout = BatchLayout(ids, batch.gathered(ids), (), shards, world, shards.start, None)
    total = z.new_zeros(2, num_bins + 1)
    # an empty block connects the candidates, whose backward pass is a message, with a shard without rows
    for rows in [slice(0, len(z))] if is_dense() else row_blocks(len(z), 4 * len(candidates), z.dtype):
        block = layout.block(rows, z[rows], candidates)
        lower, share = nearest_nodes(matmul(block.anchors, candidates.T), num_bins)
        nodes, weights = torch.stack([lower, lower + 1]), torch.stack([1 - share, share])
        result = [_sums_by_node(nodes, weights, mask, num_bins) for mask in (block.positive, block.negative)]
        total = total + torch.stack(result)
    total = batch.sum(total, gradient="complete")
    pairs = total.detach().sum(1, keepdim=True)
    positives, negatives = total / pairs.where(pairs > 0, 1)
    return positives, negatives


def nearest_nodes(similarity: Tensor, num_bins: int) -> tuple[Tensor, Tensor]:
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
    lower, share = nearest_nodes(block.anchors @ block.candidates.T, len(of_negatives) - 1)
    at_pairs = [(1 - share) * table[lower] + share * table[lower + 1] for table in (of_positives, of_negatives)]
    positive, negative = (x.where(mask, 0) for x, mask in zip(at_pairs, (block.positive, block.negative), strict=True))
    return row_sums(positive, negative), row_sums(block.positive, block.negative)
