"""Rows of pairs of embeddings: anchors are pairs, candidates are pairs and single embeddings, in one call of the engine."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from contrastive_zoo.engine.batch import Batch, Reduction
from contrastive_zoo.engine.rowwise import BlockLoss, reduce_rows


class PairBlock(NamedTuple):
    """A block whose anchors are pairs, and whose candidates are pairs and single embeddings."""

    first: Tensor
    """The first rows of the anchors, [c, d]."""
    second: Tensor
    candidate_first: Tensor
    """The first rows of the candidates that are pairs, [K, d]; of others the single row."""
    documents: Tensor
    """The second rows of the candidates that are pairs, and single rows, [K, d]."""
    is_pair: Tensor
    """Which candidates are pairs, [K]."""


def reduce_pairs(
    batch: Batch,
    loss: BlockLoss,
    rows: Sequence[Tensor],
    guides: Sequence[Sequence[Tensor]] = (),
    *,
    owners: Tensor | None = None,
    reduction: Reduction,
    unsupported: str | None = None,
) -> Float[Tensor, "..."]:
    """Reduce a loss of blocks whose anchors are pairs, and whose candidates are all ranks' pairs and single embeddings.

    Rows are the first and the second embeddings of pairs, and single ones, of which the batch's ``negatives`` have the
    split; guides are the same, without gradient. The block's first companion says which candidates are single, those
    after it are of the guides. ``owners`` are the pairs of this rank that single embeddings are also positives of, or −1
    for none; None is −1. ``unsupported`` says why Triton kernels cannot compute it, for who has chosen them.
    """
    batch.kernels.compute(batch.name, 0, 0, unsupported=unsupported)
    first, second, singles = rows
    pairs, columns, single = concat_pairs(first, second, singles)
    ids, samples = batch.indices(), batch.samples
    of_singles = ids.new_full((len(singles),), -1)
    if owners is not None:
        of_singles = torch.where(owners < 0, of_singles, owners + samples.start)
    of_guides = [concat_pairs(*guide)[:2] for guide in guides]
    return reduce_rows(
        batch, loss, pairs, ids, candidates=columns, candidate_ids=torch.cat([ids, of_singles]),
        candidate_shards=samples.plus(batch.shards["negatives"]) if "negatives" in batch.shards else samples,
        companions=[(ids, single), *of_guides], reduction=reduction,
    )  # fmt: skip


def concat_pairs(
    first: Float[Tensor, "n d"], second: Float[Tensor, "n d"], singles: Float[Tensor, "m d"]
) -> tuple[Float[Tensor, "n e"], Float[Tensor, "k e"], Bool[Tensor, " k"]]:
    """Return pairs as anchors, pairs and singles as candidates of the same width, and which candidates are singles.

    An anchor holds both of its rows, so that either of them can be compared.
    """
    pairs = torch.cat([first, second], 1)
    single = torch.arange(len(pairs) + len(singles), device=pairs.device) >= len(pairs)
    return pairs, torch.cat([pairs, torch.cat([singles, torch.zeros_like(singles)], 1)]), single


def split_pairs(anchors: Tensor, candidates: Tensor, single: Tensor) -> PairBlock:
    """Return the parts that :func:`concat_pairs` concatenated, of one block.

    Candidates keep their places: to select the pairs among them, an accelerator would have to report their number.
    """
    (first, second), (candidate_first, candidate_second) = anchors.chunk(2, 1), candidates.chunk(2, 1)
    documents = candidate_first.where(single[:, None], candidate_second)
    return PairBlock(first, second, candidate_first, documents, ~single)
