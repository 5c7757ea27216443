"""Walk over sets of tokens that are stored one after the other, in blocks of sets of about one length."""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def packed_tokens(
    rows: Float[Tensor, "n L d"], mask: Bool[Tensor, "n L"] | Int[Tensor, "n L"] | None
) -> tuple[Float[Tensor, "t d"], Int[Tensor, " n"]]:
    """Return the valid tokens of all sets, one set after the other, and the number of tokens of each set.

    Examples:
        >>> tokens, lengths = packed_tokens(torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]]), torch.tensor([[1, 0], [1, 1]]))
        >>> tokens.flatten().tolist(), lengths.tolist()
        ([1.0, 3.0, 4.0], [1, 2])
    """
    if mask is None:
        return rows.flatten(0, 1), torch.full((len(rows),), rows.shape[1], device=rows.device)
    valid = mask.to(rows.device) != 0
    return rows[valid], valid.sum(1)


def padded_blocks(
    lengths: Sequence[int], tokens: int, sets: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield blocks of packed sets, the longest first: the indices of the sets, [b], and of their tokens, [b, L].

    A set that is shorter than the longest of its block repeats its first token. A maximum over the tokens is then that
    over the set, and needs no mask.

    Args:
        lengths: tokens of each set, at least 1.
        tokens: the largest number of tokens of a block of more than one set.
        sets: the largest number of sets of a block.
        device: where the indices are needed.

    Examples:
        >>> [(sets.tolist(), index.tolist()) for sets, index in padded_blocks([1, 3, 2], 6, 2, torch.device("cpu"))]
        [([1, 2], [[1, 2, 3], [4, 5, 4]]), ([0], [[0]])]
    """
    size = torch.tensor(lengths, dtype=torch.int64)
    start = size.cumsum(0) - size
    size, order = size.sort(descending=True, stable=True)
    first = 0
    while first < len(order):
        longest = int(size[first])
        block = slice(first, first + max(1, min(sets, tokens // longest)))
        position = torch.arange(longest).expand(len(order[block]), longest)
        index = start[order[block], None] + position.where(position < size[block, None], 0)
        yield order[block].to(device), index.to(device)
        first = block.stop


def sum_by_set(values: Float[Tensor, "t k"], lengths: Int[Tensor, " n"]) -> Float[Tensor, "n k"]:
    """Return the sums of the rows of each set.

    Examples:
        >>> sum_by_set(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([1, 2])).tolist()
        [[1.0], [5.0]]
    """
    return values.new_zeros(len(lengths), values.shape[1]).index_add_(0, set_of_token(lengths, len(values)), values)


def set_of_token(lengths: Int[Tensor, " n"], tokens: int) -> Int[Tensor, " t"]:
    """Return the index of the set of each of so many tokens.

    Examples:
        >>> set_of_token(torch.tensor([1, 2]), 3).tolist()
        [0, 1, 1]
    """
    return torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths, output_size=tokens)


def sum_selected(
    rows: Float[Tensor, "t d"], weights: Float[Tensor, "t b"], position: Int[Tensor, "t b"], length: int
) -> Float[Tensor, "c d"]:
    """Return, for each token of b sets of ``length`` tokens, the weighted sum of the rows that selected it, [b length, d].

    Row a selected token ``position[a, k]`` of set k, with the weight ``weights[a, k]``. Equal to ``onehot.T @ rows``, with
    onehot the weights at their tokens, [t, b length]; it takes 1 / length of the multiplications.

    Examples:
        >>> rows, position = torch.tensor([[1.0], [10.0]]), torch.tensor([[0, 1], [0, 0]])
        >>> sum_selected(rows, torch.ones(2, 2), position, 2).flatten().tolist()
        [11.0, 0.0, 10.0, 1.0]
    """
    sets = position.shape[1]
    key = position + length * torch.arange(sets, device=position.device)
    key, order = key.flatten().sort(stable=True)
    starts = torch.searchsorted(key, torch.arange(sets * length, device=key.device))
    return torch.nn.functional.embedding_bag(
        order // sets, rows, starts, mode="sum", per_sample_weights=weights.flatten()[order]
    )
