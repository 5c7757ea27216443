"""Walk the blocks of documents of late interaction, in the order in which they arrive: scores, and gradients of these."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from contrastive_zoo.engine import tiling
from contrastive_zoo.engine.exchange import GatherExchange, Operand, Ring, Sweep
from contrastive_zoo.engine.tiling import CachedLogits
from contrastive_zoo.ranks.world import Shards


@dataclass(frozen=True, kw_only=True)
class MaxSimSweep(Sweep):
    """Compute the tiles of the local queries, document block by document block; rows and columns are tokens."""

    query_lengths: Tensor
    document_lengths: Tensor  # of all ranks
    read_lengths: Sequence[int]  # the same on the host
    document_shards: Shards

    def blocks(self, queries: Tensor, columns: slice) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield blocks of a rank's documents: their columns of the scores, and which of the rank's tokens they have."""
        elements = tiling.tile_bytes(queries) // queries.dtype.itemsize
        sizes = tiling.tile_shape(queries)[1], max(1, elements // max(1, len(queries)))
        for sets, index in padded_blocks(self.document_lengths[columns], self.read_lengths[columns], *sizes):
            yield columns.start + sets, index

    def _visits(self, exchange: GatherExchange | Ring) -> Iterator[tuple[Tensor, slice]]:
        """Yield each rank's document tokens, and the columns of its documents."""
        for block, tokens in zip(exchange.blocks, exchange, strict=True):
            yield tokens, Shards(self.document_shards.sizes, block.ahead).local

    def scores(
        self, queries: Tensor, exchange: GatherExchange | Ring, cached: CachedLogits
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the scores, and the positions of the selected tokens of each block; None where they do not fit."""
        scores = queries.new_empty(len(self.query_lengths), len(self.document_lengths))
        positions: list[Tensor | None] = []
        left = self.operand(queries)
        for tokens, of_rank in self._visits(exchange):
            right = self.operand(tokens)
            for columns, block in self.blocks(queries, of_rank):
                documents, longest = block.shape
                keep = cached.reserve(len(queries) * documents * small_integer(longest).itemsize)
                best, position = best_tokens(left, right, block, select=keep)
                scores[:, columns] = sum_by_set(best, self.query_lengths)
                positions.append(position)
        return scores, positions

    def gradients(
        self, queries: Tensor, exchange: GatherExchange | Ring, dscores: Tensor, positions: Sequence[Any], *totals: Any
    ) -> Iterator[Tensor]:
        """Add the gradients of the queries and of the local documents to their totals; yield those of other documents."""
        stored, (dqueries, ddocuments) = iter(positions), totals
        left, sets = self.operand(queries), set_of_token(self.query_lengths, len(queries))
        for visit, (tokens, of_rank) in enumerate(self._visits(exchange)):
            right = self.operand(tokens)
            total = ddocuments if visit == 0 or ddocuments is None else tokens.new_zeros(tokens.shape)
            for columns, block in self.blocks(queries, of_rank):
                position = next(stored)
                if position is None:
                    _, position = best_tokens(left, right, block, select=True)
                assert position is not None  # it was asked for
                weights, position = dscores[:, columns][sets], position.long()
                if dqueries is not None and len(queries):
                    selected = block[torch.arange(len(block), device=block.device), position]
                    dqueries += F.embedding_bag(selected, _unit(right), mode="sum", per_sample_weights=weights)
                if total is not None and len(queries):
                    total.index_add_(0, block.flatten(), sum_selected(_unit(left), weights, position, block.shape[1]))
            if visit > 0 and total is not None:
                yield total


def _unit(tokens: Operand) -> Tensor:
    return tokens.rows if tokens.inverse is None else tokens.rows * tokens.inverse[:, None]


def best_tokens(queries: Operand, tokens: Operand, index: Tensor, *, select: bool) -> tuple[Tensor, Tensor | None]:
    """Return the largest similarity of each query token to tokens [b, L] of documents, and which of these has it."""
    rows, candidates = queries.rows, tokens.rows[index.flatten()].T
    best = rows.new_empty(len(rows), len(index))
    position = torch.empty_like(best, dtype=small_integer(index.shape[1])) if select else None
    height = max(1, tiling.tile_bytes(rows) // (index.numel() * rows.dtype.itemsize))
    for top in range(0, len(rows), height):
        part = slice(top, top + height)
        similarity = rows[part] @ candidates
        if tokens.inverse is not None:
            similarity *= tokens.inverse[index.flatten()]
        similarity = similarity.view(-1, *index.shape)
        if position is None:
            torch.amax(similarity, 2, out=best[part])
        else:
            best[part], position[part] = similarity.max(2)
    return best if queries.inverse is None else best * queries.inverse[:, None], position


def small_integer(positions: int) -> torch.dtype:
    return torch.uint8 if positions <= 2**8 else torch.int16 if positions <= 2**15 else torch.int32


def padded_blocks(
    lengths: Int[Tensor, " n"], read: Sequence[int], tokens: int, sets: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield blocks of at most so many sets and tokens, the longest first: indices of sets, [b], and of tokens, [b, L]."""
    start = lengths.cumsum(0) - lengths
    size, order = lengths.sort(descending=True, stable=True)
    descending, first = sorted(read, reverse=True), 0
    while first < len(order):
        longest = descending[first]
        block = slice(first, first + max(1, min(sets, tokens // longest)))
        position = torch.arange(longest, device=lengths.device).expand(len(order[block]), longest)
        # a shorter set repeats its first token, so that a maximum needs no mask
        index = start[order[block], None] + position.where(position < size[block, None], 0)
        yield order[block], index
        first = block.stop


def sum_by_set(values: Float[Tensor, "t k"], lengths: Int[Tensor, " n"]) -> Float[Tensor, "n k"]:
    return values.new_zeros(len(lengths), values.shape[1]).index_add_(0, set_of_token(lengths, len(values)), values)


def set_of_token(lengths: Int[Tensor, " n"], tokens: int) -> Int[Tensor, " t"]:
    return torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths, output_size=tokens)


def sum_selected(
    rows: Float[Tensor, "t d"], weights: Float[Tensor, "t b"], position: Int[Tensor, "t b"], length: int
) -> Float[Tensor, "c d"]:
    """Return ``onehot.T @ rows``, onehot being ``weights`` at the tokens ``position`` of b sets of ``length`` tokens."""
    sets = position.shape[1]
    key = position + length * torch.arange(sets, device=position.device)
    key, order = key.flatten().sort(stable=True)
    starts = torch.searchsorted(key, torch.arange(sets * length, device=key.device))
    return F.embedding_bag(order // sets, rows, starts, mode="sum", per_sample_weights=weights.flatten()[order])
