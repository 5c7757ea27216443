"""Score sets of tokens in Triton: no similarity of two tokens leaves the chip.

A kernel returns the largest product of each query token and document, and which token has it. The backward pass reads the
selected tokens: gradients of queries are sums over documents, those of documents products with a matrix that is mostly zero,
built on the chip. All sums have float32 and a fixed order. Tokens of 16 bits are multiplied as they came.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from contrastive_zoo.engine import tiling
from contrastive_zoo.engine.kernels.blocks import MAX_TILES, MIN_PROGRAMS, Operand, Tile, cdiv, precision_of, tiles_for
from contrastive_zoo.engine.kernels.max_sim_tiles import best_tokens, query_gradients, sums_of_sets, token_gradients
from contrastive_zoo.engine.max_sim_sweep import MaxSimSweep, set_of_token, small_integer

RESIDENT_BYTES = 512  # largest row of a token of which a tile holds all features: then queries are read once a program
SMALLEST_TILE = 32  # tokens of a document


@dataclass(frozen=True)
class Documents:
    """A block of documents, cut into tiles of at most ``width`` tokens; the numbers are those of ``best_tokens``."""

    starts: Tensor
    lengths: Tensor
    counts: list[int]  # the lengths, on the host
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        """How many documents there are, and the number of tokens of the longest."""
        return len(self.counts), max(self.counts)

    def tiles(self) -> tuple[Tensor, Tensor]:
        """Return document, first token, position of it and tokens left of each tile, and each document's first tile."""
        of_document = (self.lengths + self.width - 1) // self.width
        first = F.pad(of_document.cumsum(0), (1, 0))
        total = sum(cdiv(count, self.width) for count in self.counts)
        document = set_of_token(of_document, total)
        offset = (torch.arange(total, device=first.device) - first[document]) * self.width
        tiles = torch.stack([document, self.starts[document] + offset, offset, self.lengths[document] - offset], 1)
        return tiles.int(), first.int()


def token_tiles(plain: Tile, rows: Tensor, precision: str, longest: int) -> tuple[Tile, Tile]:
    """Return the tiles of products, and of gradients with respect to documents, from a device's tile of pairs.

    Their rows are query tokens, columns document tokens; ``depth`` are features of one step, or of one program.
    """
    fits = rows.shape[1] * rows.element_size() <= RESIDENT_BYTES and precision != "ieee"
    columns = min(plain.columns, max(SMALLEST_TILE, _power_of_2(longest)))
    features = max(16, _power_of_2(rows.shape[1]))
    products = Tile(min(plain.rows, 128), columns, features if fits else plain.depth, 8, 2 if fits else 3)
    return products, Tile(plain.depth, columns, min(features, plain.columns), 8, 3)


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _tiles(rows: Tensor, longest: int) -> tuple[Tile, Tile]:
    return token_tiles(tiles_for(rows)[0], rows, precision_of(rows), longest)


def _unit(weights: Tensor) -> Tensor:
    """Return the largest weight, by which they are divided: float16 has none below 6e-8."""
    return weights.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)


class KernelSweep(MaxSimSweep):
    """Compute blocks of documents as they arrive, each by a few launches."""

    def operand(self, rows: Tensor) -> Operand:
        rows = rows.to(self.dtype or rows.dtype)
        return Operand.of(rows, unit_norm=self.normalizes)

    def blocks(self, queries: Tensor, columns: slice) -> Iterator[tuple[slice, Documents]]:
        """Yield blocks whose largest products, of each query token and document, fit into a tile of the engine."""
        lengths, read = self.document_lengths[columns], self.read_lengths[columns]
        starts, rows = lengths.cumsum(0) - lengths, queries.to(self.dtype or queries.dtype)[:0]
        size = max(1, tiling.tile_bytes(queries) // (4 * max(1, len(queries))))
        for first in range(0, len(read), size):
            block = slice(first, min(len(read), first + size))
            tile, _ = _tiles(rows, max(read[block]))
            documents = Documents(starts[block], lengths[block], [*read[block]], tile.columns)
            yield slice(columns.start + first, columns.start + block.stop), documents

    def block_scores(
        self, queries: Operand, tokens: Operand, block: Documents, *, select: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the scores of a block, [n, b], and the position of the selected token of each document, [b, t]."""
        (documents, longest), t, n = block.shape, len(queries), len(self.query_lengths)
        scores = self.query_lengths.new_empty(n, documents, dtype=torch.float32)
        best = scores.new_empty(documents, t)
        selected = torch.empty_like(best, dtype=small_integer(longest)) if select else None
        if not t:
            return scores, selected
        tile, _ = _tiles(queries.rows, longest)
        row_blocks = cdiv(t, tile.rows)
        chunk = max(1, min(MAX_TILES, row_blocks * documents // MIN_PROGRAMS))
        best_tokens[(row_blocks * cdiv(documents, chunk),)](
            queries.tiles(slice(None), tile.rows, tile.depth), tokens.tiles(slice(None), tile.columns, tile.depth),
            tokens.factors, *block.tiles(), best, best if selected is None else selected, t, queries.width, documents,
            chunk,
            SELECT=select, RESIDENT=tile.depth >= queries.width, PRECISION=queries.precision,
            BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=tile.depth, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        starts = F.pad(self.query_lengths.cumsum(0), (1, 0))
        sums_of_sets[(n, cdiv(documents, 32))](
            best, queries.factors, starts, scores, t, documents, scores.stride(0), BLOCK_N=32, BLOCK_K=32, num_warps=4
        )
        return scores, selected

    def add_gradients(
        self, queries: Operand, tokens: Operand, block: Documents, position: Tensor, dscores: Tensor,
        *totals: Tensor | None,
    ) -> None:  # fmt: skip
        """Add what a block's gradient of the scores, [n, b], gives to queries and tokens to their totals."""
        (documents, longest), t, (dqueries, dtokens) = block.shape, len(queries), totals
        if not t:
            return
        weights, sets = dscores.T.contiguous(), set_of_token(self.query_lengths, t).int()
        _, tile = _tiles(queries.rows, longest)
        if dqueries is not None:
            query_gradients[(cdiv(t, 16), cdiv(queries.width, tile.depth))](
                tokens.rows, tokens.factors, block.starts, position, weights, sets, dqueries, t, weights.shape[1],
                queries.width, documents, tokens.rows.stride(0), BLOCK_M=16, BLOCK_K=tile.depth, num_warps=4,
            )  # fmt: skip
        if dtokens is not None:
            unit = _unit(weights)
            weights = weights / unit
            if queries.rows.dtype == torch.float32:
                weights = Operand.of(weights).rows
            tiles, _ = block.tiles()
            token_gradients[(len(tiles), cdiv(queries.width, tile.depth))](
                queries.tiles(slice(None), tile.rows, tile.depth), queries.factors, tiles, position, weights, sets,
                unit, dtokens, t, queries.width, weights.stride(0), PRECISION=queries.precision,
                BLOCK_M=tile.rows, BLOCK_N=block.width, BLOCK_K=tile.depth, num_warps=tile.warps,
                num_stages=tile.stages,
            )  # fmt: skip
