"""Chunks by a budget of padded tokens: which samples are encoded together, for the sampler and for GradCache."""

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from contrastive_zoo.ranks.row_checks import described, is_integer


def token_chunks(lengths: ArrayLike, chunk_tokens: int) -> list[NDArray[np.int64]]:
    """Return the samples of each chunk, such that no chunk has more than ``chunk_tokens`` padded tokens.

    A chunk of k samples has k · (its longest sample) padded tokens. Each chunk takes the longest samples that are left, as
    many as fit. No other division of the samples has fewer chunks.

    Args:
        lengths: tokens of each sample, [n].
        chunk_tokens: the most padded tokens of a chunk.

    Raises:
        ValueError: lengths or a budget that are no integers of at least 1; a sample that is longer than the budget.

    Examples:
        >>> lengths = np.array([3, 9, 2, 4, 4])
        >>> [lengths[chunk].tolist() for chunk in token_chunks(lengths, 10)]
        [[9], [4, 4], [3, 2]]
    """
    if (problem := lengths_problem(lengths, chunk_tokens)) is not None:
        raise ValueError(f"token_chunks: {problem}")
    array = np.asarray(lengths, np.int64)
    order = np.argsort(-array, kind="stable")
    return np.split(order, chunk_ends(array[order], chunk_tokens)[:-1]) if len(order) else []


def chunk_ends(descending: NDArray[np.int64], chunk_tokens: int) -> list[int]:
    """Return where each chunk of samples ends, the longest of which are first."""
    ends = [0]
    while ends[-1] < len(descending):
        ends.append(min(ends[-1] + chunk_tokens // int(descending[ends[-1]]), len(descending)))
    return ends[1:]


def lengths_problem(lengths: ArrayLike, chunk_tokens: object) -> str | None:
    try:
        array = np.asarray(lengths)
    except (TypeError, ValueError, RuntimeError):  # ragged lists, tensors of another device or with a gradient
        return f"lengths are integers [n] on the CPU, got {described(lengths)}."
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        return f"lengths are integers [n], got {array.dtype} {list(array.shape)}."
    if not is_integer(chunk_tokens, at_least=1, at_most=2**60):
        return f"chunk_tokens is an integer in 1 … 2**60, got {chunk_tokens!r}."
    if array.size and array.min() < 1:
        return f"a sample has at least 1 token, got {array.min()} for sample {array.argmin()}."
    if array.size and array.max() > chunk_tokens:
        return (
            f"a sample has at most chunk_tokens={chunk_tokens} tokens, got {array.max()} for sample {array.argmax()}. Cut "
            "longer samples, or raise chunk_tokens."
        )
    return None


def mask_problem(mask: object, chunk_tokens: int) -> str | None:
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.is_floating_point():
        return f"attention_mask is a keyword with integers or bools [n, tokens], got {described(mask)}."
    if not (_padded_right(mask) or _padded_right(mask.flip(1))):
        return "attention_mask is padded on one side, the same one for all samples, got one with gaps or on both sides."
    return lengths_problem(_lengths(mask), chunk_tokens)


def mask_parts(mask: Tensor, chunk_tokens: int) -> list[tuple[Tensor, slice]]:
    """Return the samples of each chunk and the columns that are not padding in all of them; one chunk if there are none."""
    lengths = _lengths(mask)
    result = []
    for rows in token_chunks(lengths, chunk_tokens) or [np.arange(0)]:
        longest = int(lengths[rows].max(initial=1))
        columns = slice(longest) if _padded_right(mask) else slice(mask.shape[1] - longest, None)
        result.append((torch.from_numpy(rows).to(mask.device), columns))
    return result


def _padded_right(mask: Tensor) -> bool:
    return bool((mask[:, 1:] <= mask[:, :-1]).all())


def _lengths(mask: Tensor) -> NDArray[np.int64]:
    return np.maximum(mask.bool().sum(1).numpy(force=True), 1)  # a sample without tokens has a row all the same
