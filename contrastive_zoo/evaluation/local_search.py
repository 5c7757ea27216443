"""The exact nearest neighbours among the rows of one rank.

faiss proposes candidates in float32. Their scores are computed again in float64. A query is certain if its k-th score is
higher than anything that faiss may have missed, given the rounding of float32. The rest is compared with every row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from contrastive_zoo.evaluation.exact import norms, prepared, similarities
from contrastive_zoo.evaluation.faiss_search import ApproximateIndex, flat_search, index_search

_BLOCK_ELEMENTS = 2**24
"""Elements of the rows that faiss searches at once, 64 MiB in float32; every block costs it one more heap."""

_ELEMENTS = 2**21
"""Elements of the float64 matrices that are held at once, 16 MiB each."""

_PAIR_ELEMENTS = 2**19
"""Elements of the candidates' rows that are held at once: they stay in the cache (three times as fast as 2^22)."""

_UNCERTAIN = 256
"""Queries that are compared with all rows at once."""

_MARGIN = 8
"""Candidates beyond k, as rounding may exchange neighbours in order; an eighth of k is added."""


class Gallery:
    """The rows of one rank in which is searched.

    Args:
        rows: [m, d]. Rows are normalised block by block, so a memory map stays on the disk.
        normalize: whether scores are cosines.
        index: the approximate index; None for an exact search.
    """

    def __init__(self, rows: Tensor, *, normalize: bool, index: ApproximateIndex | None = None) -> None:
        self.rows, self.normalize = rows, normalize
        step = max(1, _ELEMENTS // max(1, rows.shape[1]))
        self.lengths = torch.cat([torch.empty(0, 1, dtype=torch.float64), *(norms(x.cpu()) for x in rows.split(step))])
        self.index: Any = index.built(self.take(slice(None))) if index is not None and len(rows) else None

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, which: slice | Tensor) -> Tensor:
        """Return these rows as they are compared."""
        return prepared(self.rows[which], normalize=self.normalize, lengths=self.lengths[which])

    def blocks(self, elements: int = _BLOCK_ELEMENTS) -> Iterator[tuple[int, Tensor]]:
        """Yield all rows in blocks, each with the position of its first row."""
        step = max(1, elements // max(1, self.rows.shape[1]))
        for start in range(0, len(self), step):
            yield start, self.take(slice(start, start + step))

    def top(
        self, queries: Float[Tensor, "n d"], k: int, excluded: Int[Tensor, "n e"]
    ) -> tuple[Float[Tensor, "n c"], Int[Tensor, "n c"], Bool[Tensor, " n"]]:
        """Return the k best rows of each query: scores and positions, and for which of them the search is complete.

        Rows are ordered by score, then by position. With fewer than k rows the rest is −∞ and −1. If a query is complete,
        rows beyond the k-th with the score of the k-th follow, all of them; otherwise there may be more.

        Args:
            queries: prepared rows.
            k: at most the number of rows.
            excluded: positions that are left out; −1 for none.
        """
        if len(self) == 0:
            nothing = torch.empty(len(queries), 0)
            return nothing.double(), nothing.long(), torch.ones(len(queries), dtype=torch.bool)
        scores, positions, complete = self._candidates(queries, k, excluded)
        scores, positions = ordered(scores, positions, scores.shape[1])
        if self.index is None:
            for some in (~complete).nonzero().flatten().split(_UNCERTAIN):
                scores[some], positions[some] = self._compared_with_all(
                    queries[some], k, scores.shape[1], excluded[some]
                )
        return scores, positions, complete

    def _candidates(
        self, queries: Tensor, k: int, excluded: Tensor
    ) -> tuple[Float[Tensor, "n c"], Int[Tensor, "n c"], Bool[Tensor, " n"]]:
        """Return candidates with their exact scores, and for which queries every row with the k-th score is among them."""
        depth = min(len(self), k + excluded.shape[1] + _MARGIN + k // 8)
        if self.index is not None:
            positions = index_search(queries, self.index, depth)
            last = None
        else:
            last, positions = self._found_by_faiss(queries, depth)
        scores = self._scores(queries, positions)
        for column in (torch.full((len(queries),), -1), *excluded.T):
            scores.masked_fill_(positions == column[:, None], -torch.inf)
        if last is None or depth == len(self):
            return scores, positions, torch.full((len(queries),), last is not None)
        kth = scores.kthvalue(depth - k + 1, dim=1).values
        width = queries.shape[1]
        longest = 1.0 + 2.0**-20 if self.normalize else self.lengths.max().item()
        rounding = (width + 8) * 2.0**-24 * longest * norms(queries)[:, 0] + width * 2.0**-126
        return scores, positions, kth > last + rounding

    def _found_by_faiss(self, queries: Tensor, depth: int) -> tuple[Float[Tensor, " n"], Int[Tensor, "n depth"]]:
        """Return the float32 score of the last of ``depth`` candidates, and their positions."""
        best, positions = torch.empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.int64)
        for start, rows in self.blocks():
            scores, found = flat_search(queries, rows, min(depth, len(rows)))
            best, positions = torch.cat([best, scores], 1), torch.cat([positions, found + start], 1)
            if best.shape[1] > depth:
                best, order = best.topk(depth, dim=1)
                positions = positions.gather(1, order)
        return best.amin(1).double(), positions

    def _scores(self, queries: Tensor, positions: Tensor) -> Float[Tensor, "n c"]:
        """Return the exact scores of a few rows for each query."""
        scores = torch.empty(positions.shape, dtype=torch.float64)
        step = max(1, _PAIR_ELEMENTS // max(1, positions.shape[1] * queries.shape[1]))
        for start in range(0, len(queries), step):
            some = slice(start, start + step)
            rows = self.take(positions[some].clamp(min=0).flatten()).view(*positions[some].shape, -1)
            scores[some] = similarities(queries[some, None], rows)[:, 0]
        return scores

    def pair_scores(
        self, queries: Tensor, which: Int[Tensor, " p"], positions: Int[Tensor, " p"]
    ) -> Float[Tensor, " p"]:
        """Return the exact scores of pairs: query ``which[i]`` and row ``positions[i]``."""
        scores = torch.empty(len(which), dtype=torch.float64)
        step = max(1, _PAIR_ELEMENTS // max(1, queries.shape[1]))
        for start in range(0, len(which), step):
            some = slice(start, start + step)
            scores[some] = similarities(queries[which[some], None], self.take(positions[some])[:, None])[:, 0, 0]
        return scores

    def _compared_with_all(
        self, queries: Tensor, k: int, width: int, excluded: Tensor
    ) -> tuple[Float[Tensor, "n width"], Int[Tensor, "n width"]]:
        """Return scores and positions of the k best of all rows, where candidates were not certain, padded to ``width``."""
        best = torch.empty(len(queries), 0, dtype=torch.float64)
        positions = torch.empty(len(queries), 0, dtype=torch.int64)
        for start, scores in self.score_blocks(queries, excluded):
            here = torch.arange(start, start + scores.shape[1]).expand(scores.shape)
            best, positions = first_best(torch.cat([best, scores], 1), torch.cat([positions, here], 1), k)
        return ordered(best, positions, width)

    def score_blocks(self, queries: Tensor, excluded: Tensor) -> Iterator[tuple[int, Float[Tensor, "n c"]]]:
        """Yield the exact scores of all rows in blocks; −∞ for excluded rows."""
        for start, rows in self.blocks(_ELEMENTS):
            for first in range(0, len(rows), step := max(1, _ELEMENTS // max(1, len(queries)))):
                scores = similarities(queries, rows[first : first + step])
                begin = start + first
                which, column = ((excluded >= begin) & (excluded < begin + scores.shape[1])).nonzero(as_tuple=True)
                scores[which, excluded[which, column] - begin] = -torch.inf
                yield begin, scores


def first_best(scores: Tensor, positions: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best of each row, and of equal scores the first.

    Examples:
        >>> first_best(torch.tensor([[1.0, 3.0, 3.0]]), torch.tensor([[4, 5, 6]]), 1)
        (tensor([[3.]]), tensor([[5]]))
    """
    if scores.shape[1] <= k:
        return scores, positions
    kth = scores.topk(k, dim=1).values[:, -1:]
    higher, equal = scores > kth, scores == kth
    chosen = higher | (equal & (equal.cumsum(1) <= k - higher.sum(1, keepdim=True)))
    return scores[chosen].view(-1, k), positions[chosen].view(-1, k)


def ordered(scores: Tensor, positions: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best of each row by score, then by position; padded with −∞ and −1.

    Examples:
        >>> ordered(torch.tensor([[2.0, 3.0, 3.0]]), torch.tensor([[0, 9, 4]]), 2)
        (tensor([[3., 3.]]), tensor([[4, 9]]))
    """
    positions, order = positions.sort(dim=1)
    scores, order = scores.gather(1, order).sort(dim=1, descending=True, stable=True)
    scores, positions = scores[:, :k], positions.gather(1, order[:, :k])
    if (missing := k - scores.shape[1]) > 0:
        scores = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
        positions = torch.nn.functional.pad(positions, (0, missing), value=-1)
    return scores, positions.masked_fill(scores == -torch.inf, -1)
