"""Batches by a budget of padded tokens: few long samples or many short ones in each chunk."""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from contrastive_zoo.data.batch_sampler import BaseBatchSampler, Batches, rank_bounds, size_problem
from contrastive_zoo.ranks.random_keys import random_keys
from contrastive_zoo.ranks.world import Processes
from contrastive_zoo.wrapper.token_chunks import chunk_ends, lengths_problem


class TokenBatchSampler(BaseBatchSampler):
    """Global batches of ``chunks_per_batch`` chunks of at most ``chunk_tokens`` padded tokens, each sample once per epoch.

    The epoch's random order is cut into batches: each takes as many samples as :func:`token_chunks` packs into
    ``chunks_per_batch`` chunks. A batch has its longest samples first, so a chunk has samples of similar lengths, while the
    batch has samples of all lengths.

    Ranks share whole chunks, ⌈``chunks_per_batch`` / W⌉ at most: one each if there are as many ranks as chunks, none for
    some if there are more. So ranks have different numbers of samples, and as many padded tokens as their chunks allow.

    Args:
        lengths: tokens of each sample, [n], the same on every rank.
        chunk_tokens: the most padded tokens of a chunk, which is (its samples) · (its longest sample).
        chunks_per_batch: chunks of a global batch, on all ranks together; the last batch may have fewer.
        seed: see :class:`BaseBatchSampler`.
        rank_weights: each rank's share of the chunks of a global batch; None is an even split.
        process_group: see :class:`BaseBatchSampler`.

    Raises:
        ValueError: no lengths, lengths that are not integers of at least 1, a sample that is longer than ``chunk_tokens``,
            sizes that are no integers of at least 1, or what the base class refuses.

    Examples:
        >>> from contrastive_zoo import World
        >>> lengths = np.array([9, 2, 3, 2, 5, 3, 4])
        >>> for rank in range(2):
        ...     sampler = TokenBatchSampler(
        ...         lengths, chunk_tokens=10, chunks_per_batch=2, process_group=World(rank, 2))
        ...     print([lengths[part].tolist() for part in sampler])
        [[9], [5, 4]]
        [[3, 2, 2], [3]]
    """

    def __init__(
        self,
        lengths: ArrayLike,
        *,
        chunk_tokens: int,
        chunks_per_batch: int,
        seed: int = 0,
        rank_weights: Sequence[float] | None = None,
        process_group: Processes = None,
    ) -> None:
        problem = lengths_problem(lengths, chunk_tokens) or size_problem("chunks_per_batch", chunks_per_batch)
        array = np.asarray(lengths if problem is None else [], np.int64)
        if problem is None and not len(array):
            problem = "lengths are one per sample, got none."
        self.lengths, self.chunk_tokens, self.chunks_per_batch = array, chunk_tokens, chunks_per_batch
        settings = {"lengths": array, "chunk_tokens": chunk_tokens, "chunks_per_batch": chunks_per_batch}
        super().__init__(settings, problem, seed=seed, rank_weights=rank_weights, process_group=process_group)

    def global_batches(self, epoch: int) -> Batches:
        order = np.argsort(random_keys(self.seed, epoch, np.arange(len(self.lengths))))
        lengths = self.lengths[order]
        # no batch has more tokens than all its chunks
        tokens, budget = np.cumsum(lengths, dtype=np.float64), float(self.chunk_tokens * self.chunks_per_batch)
        batches, start = [], 0
        while start < len(order):
            before = tokens[start - 1] if start else 0.0
            most = int(np.searchsorted(tokens, before + budget, "right")) - start
            size = bisect_right(
                range(1, most + 1), self.chunks_per_batch, key=lambda k: self._chunks(lengths[start:][:k])
            )
            batch = order[start : start + max(size, 1)]
            batches.append(batch[np.argsort(-self.lengths[batch], kind="stable")])
            start += len(batch)
        return batches

    def _chunks(self, lengths: NDArray[np.int64]) -> int:
        return len(chunk_ends(-np.sort(-lengths), self.chunk_tokens))

    def bounds(self, batch: NDArray[np.int64], weights: tuple[float, ...]) -> list[int]:
        ends = [0, *chunk_ends(self.lengths[batch], self.chunk_tokens)]
        return [ends[index] for index in rank_bounds(len(ends) - 1, weights)]
