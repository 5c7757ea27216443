"""Walk over sets of tokens that are stored one after the other, in blocks of sets of about one length."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from contrastive_zoo.engine.masked import masked_indices
from contrastive_zoo.ranks import devices


def read_lengths(rows: Mapping[str, Tensor], masks: Mapping[str, Tensor | None]) -> dict[str, list[int]]:
    """Return the number of valid tokens of each set, by name; the host waits once for those of all masks.

    A mask says which tokens [n, L, d] are valid (not 0), [n, L]; None, or no mask of that name, is all of them.
    """
    arguments = {name: mask for name, mask in masks.items() if mask is not None}
    counts = dict(zip(arguments, _counts([*arguments.values()]), strict=True))
    return {name: counts.get(name, [x.shape[1]] * len(x)) for name, x in rows.items()}


def _counts(masks: Sequence[Tensor]) -> list[list[int]]:
    """Return the number of valid tokens of each set, by mask; those that are on an accelerator are read together."""
    counts = [(mask != 0).sum(1) for mask in masks]
    waiting = [index for index, x in enumerate(counts) if not devices.on_cpu(x)]
    if waiting:
        together = torch.cat([counts[index] for index in waiting]).cpu()
        for index, x in zip(waiting, together.split([len(masks[index]) for index in waiting]), strict=True):
            counts[index] = x
    return [x.tolist() for x in counts]


def packed_tokens(
    rows: Float[Tensor, "n L d"], mask: Bool[Tensor, "n L"] | Int[Tensor, "n L"] | None, count: int
) -> tuple[Float[Tensor, "t d"], Int[Tensor, " n"]]:
    """Return the valid tokens of all sets, one set after the other, and the number of tokens of each set.

    The mask says which are valid (not 0), None is all of them; ``count`` are valid.
    """
    if mask is None:
        return rows.flatten(0, 1), torch.full((len(rows),), rows.shape[1], device=rows.device)
    valid = mask.to(rows.device) != 0
    if devices.on_cpu(rows):
        return rows[valid], valid.sum(1)
    columns, _ = masked_indices(valid.view(1, -1), count)
    return rows.flatten(0, 1).index_select(0, columns[0]), valid.sum(1)


def padded_blocks(
    lengths: Int[Tensor, " n"], read: Sequence[int], tokens: int, sets: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield blocks of packed sets, the longest first: the indices of the sets, [b], and of their tokens, [b, L].

    A set that is shorter than the longest of its block repeats its first token. A maximum over the tokens is then that
    over the set, and needs no mask.

    Args:
        lengths: tokens of each set, at least 1, where the indices are needed.
        read: the same numbers on the host.
        tokens: the largest number of tokens of a block of more than one set.
        sets: the largest number of sets of a block.

    Examples:
        >>> [(sets.tolist(), index.tolist()) for sets, index in padded_blocks(torch.tensor([1, 3, 2]), [1, 3, 2], 6, 2)]
        [([1, 2], [[1, 2, 3], [4, 5, 4]]), ([0], [[0]])]
    """
    start = lengths.cumsum(0) - lengths
    size, order = lengths.sort(descending=True, stable=True)
    descending, first = sorted(read, reverse=True), 0
    while first < len(order):
        longest = descending[first]
        block = slice(first, first + max(1, min(sets, tokens // longest)))
        position = torch.arange(longest, device=lengths.device).expand(len(order[block]), longest)
        index = start[order[block], None] + position.where(position < size[block, None], 0)
        yield order[block], index
        first = block.stop


def sum_by_set(values: Float[Tensor, "t k"], lengths: Int[Tensor, " n"]) -> Float[Tensor, "n k"]:
    """Return the sums of the rows of each set."""
    return values.new_zeros(len(lengths), values.shape[1]).index_add_(0, set_of_token(lengths, len(values)), values)


def set_of_token(lengths: Int[Tensor, " n"], tokens: int) -> Int[Tensor, " t"]:
    """Return the index of the set of each of so many tokens."""
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
