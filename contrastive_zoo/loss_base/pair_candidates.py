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
    """The first rows of the candidates that are pairs, [P, d]."""
    candidate_second: Tensor
    singles: Tensor
    """The candidates that are single rows, [M, d]."""
    own_pair: Tensor
    """Whether a pair is the anchor itself, [c, P]."""
    own_single: Tensor
    """Whether a single row has the anchor's id, [c, M]."""


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


def split_pairs(anchors: Tensor, candidates: Tensor, single: Tensor, positive: Tensor) -> PairBlock:
    """Return the parts that :func:`concat_pairs` concatenated, of one block."""
    pair, extra = single.logical_not().nonzero().flatten(), single.nonzero().flatten()
    (first, second), (candidate_first, candidate_second) = anchors.chunk(2, 1), candidates[pair].chunk(2, 1)
    singles = candidates[extra].chunk(2, 1)[0]
    return PairBlock(first, second, candidate_first, candidate_second, singles, positive[:, pair], positive[:, extra])
