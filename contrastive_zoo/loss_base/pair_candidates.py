"""Use pairs of embeddings as anchors, with pairs and single embeddings as candidates, in one call of the engine."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor


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


def concat_pairs(
    first: Float[Tensor, "n d"], second: Float[Tensor, "n d"], singles: Float[Tensor, "m d"]
) -> tuple[Float[Tensor, "n e"], Float[Tensor, "k e"], Bool[Tensor, " k"]]:
    """Return pairs as anchors, pairs and singles as candidates of the same width, and which candidates are singles.

    An anchor holds both of its rows, so that either of them can be compared.

    Examples:
        >>> [x.tolist() for x in concat_pairs(torch.ones(1, 1), torch.zeros(1, 1), torch.full((1, 1), 7.0))]
        [[[1.0, 0.0]], [[1.0, 0.0], [7.0, 0.0]], [False, True]]
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
