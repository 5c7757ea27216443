"""Compute softmax losses in Triton: InfoNCE, CLIP and NT-Xent in two kernels and two matmuls of cuBLAS.

With S = scale · A Bᵀ, P_i the logit of the positive pair of row i, and R_i the log-sum-exp of the row's other logits, a
row's loss is log(1 + exp(R_i − P_i)): R_i does not contain the positive, so that a small loss is precise. Columns likewise.
Weights w_ij = exp(S_ij − log-sum-exp of row i) + the same of column j; the weight of a positive pair is minus the sum of
the others in its row and column. dA = scale · W B and dB = scale · Wᵀ A, up to the divisor of the mean and the incoming
gradient. On several ranks :class:`KernelSweep` computes blocks of S as their columns arrive.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import cdiv

from contrastive_zoo.engine.exchange import GatherExchange, RankBlock, Ring, merge_at_owners
from contrastive_zoo.engine.kernels.blocks import (
    MAX_TILES,
    NO_PARTNER,
    PARTIAL_BYTES,
    Operand,
    Tile,
    Weights,
    add_product,
    as_scalar,
    blocks,
    launches,
    precision_of,
    rows_per_program,
    tiles_for,
    write_scaled,
)  # fmt: skip
from contrastive_zoo.engine.kernels.softmax_tiles import NOTHING, finish, log_sum_exps, merge, softmax_weights
from contrastive_zoo.engine.precision import without_autocast
from contrastive_zoo.engine.softmax_arithmetic import Sums
from contrastive_zoo.engine.softmax_sweep import SoftmaxSweep
from contrastive_zoo.ranks.compiling import Function
from contrastive_zoo.ranks.transport import gather_rows


@dataclass(frozen=True)
class SoftmaxPairs:
    """The pairs of rows a and columns b. Sums of exponentials are two numbers each, see ``softmax_tiles``."""

    a: Operand
    b: Operand
    scale: Tensor
    precision: str
    symmetric: bool  # whether columns have softmaxes over rows, too
    one_tower: bool
    """Whether the columns are the rows; then only pairs above the diagonal are computed, and serve both of their rows."""
    partner: int  # how far after a row's own index the column of its positive is
    excluded: Tensor | None = None
    """[n], a column that the sum of a row leaves out, as the column's sum does the row; another number for none."""

    @property
    def swapped(self) -> "SoftmaxPairs":
        """The same pairs with columns as rows: sums of columns that lost precision are recomputed with a maximum of each."""
        swapped = replace(self, a=self.b, b=self.a, symmetric=False)
        return swapped if self.excluded is None or self.one_tower else replace(swapped, excluded=self._excluded_rows())

    def _excluded_rows(self) -> Tensor:
        assert self.excluded is not None
        columns = len(self.b)
        inside = (self.excluded >= 0) & (self.excluded < columns)
        rows = torch.arange(len(inside), dtype=torch.int32, device=inside.device)
        of_columns = torch.full_like(rows[:1], -1).expand(columns + 1).clone()
        return of_columns.scatter_(0, self.excluded.where(inside, columns).long(), rows)[:columns]

    def _launches(self, n: int, m: int, plain: Tile, edges: Tile) -> list[tuple[int, Tile]]:
        """Return the launches of a block; any tile may have an excluded pair, so that all need masks."""
        return launches(n, m, plain, edges) if self.excluded is None else [(2, edges)]

    def add_sums(
        self, of_rows: Tensor, of_columns: Tensor, positives: Tensor, precision_lost: Tensor, *, if_lost: bool = False
    ) -> None:
        """Add the sums [2, ·] of all pairs to ``of_rows`` and ``of_columns``, and write the dot products of positive pairs.

        With one tower ``of_columns`` are ``of_rows``. ``precision_lost`` is set to 1 if a sum of a column may lack
        terms. With ``if_lost`` nothing is done unless it is 1.
        """
        a, b = self.a, self.b
        plain, edges = tiles_for(a.rows, self.precision)
        side = math.isqrt(PARTIAL_BYTES * plain.columns // 8) // plain.rows * plain.rows
        # one tower needs only pairs above the diagonal; a recomputed sum covers a whole row
        upper = self.one_tower and not if_lost
        for i, j in blocks(len(a), len(b), side, upper=upper):
            n, m = i.stop - i.start, j.stop - j.start
            rows = rows_per_program(n, m, plain)
            shape = (2, cdiv(m, plain.columns), n)
            by_row = of_rows.new_full(shape, NOTHING.value) if upper and i == j else of_rows.new_empty(shape)
            by_column = of_rows.new_empty(2, cdiv(n, rows), m) if self.symmetric else by_row
            excluded = None if self.excluded is None else self.excluded[i] - j.start
            for edge, tile in self._launches(n, m, plain, edges):
                log_sum_exps[(cdiv(n, rows) * cdiv(m, tile.columns),)](
                    a.tiles(i, tile.rows, tile.depth), b.tiles(j, tile.columns, tile.depth), self.scale,
                    by_row, by_column, positives[i], positives if excluded is None else excluded, precision_lost, n, m,
                    a.width, j.start - i.start, self.partner, rows,
                    EDGE=edge, ONE_TOWER=self.one_tower, UPPER=upper and i == j, COLUMNS=self.symmetric,
                    EXCLUDED=excluded is not None, IF_LOST=if_lost, PRECISION=self.precision,
                    WARPS=min(tile.warps, tile.rows // 16), **tile.options,
                )  # fmt: skip
            merged = [(by_row, of_rows[:, i]), (by_column, of_columns[:, j])]
            for parts, out in merged[: 2 if self.symmetric else 1]:
                merge[(cdiv(out.shape[1], 32),)](
                    parts, out, precision_lost, parts.shape[1], out.shape[1], out.stride(0),
                    IF_LOST=if_lost, BLOCK_N=32, BLOCK_P=64, num_warps=4,
                )  # fmt: skip

    def add_precise_sums(self, of_rows: Tensor, of_columns: Tensor, positives: Tensor) -> None:
        """Add sums as :meth:`add_sums`, but recompute those of columns if one lost precision, each with its own maximum."""
        precision_lost = positives.new_zeros((), dtype=torch.int32)
        self.add_sums(of_rows, of_columns, positives, precision_lost)
        if not self.symmetric:
            return
        recomputed = torch.full_like(of_columns, NOTHING.value)
        unread = torch.empty_like(recomputed[0])
        self.swapped.add_sums(recomputed, recomputed, unread, precision_lost, if_lost=True)  # or does nothing
        of_columns.copy_(torch.where(precision_lost > 0, recomputed, of_columns))

    def fill(
        self, w: Tensor, i: slice, j: slice, of_rows: Tensor, of_columns: Tensor, positive_weights: Tensor, bits: int
    ) -> None:
        """Write the weights of rows i and columns j into ``w``, in units of 2^−bits.

        ``of_rows`` and ``of_columns`` are [2, ·], exponents and factors: the weight of a pair is factor · 2^(logit in
        bits − exponent), and the same of its column. ``positive_weights`` are the negated weights of positive pairs.
        """
        n, m = w.shape
        plain, edges = tiles_for(self.a.rows, self.precision)
        rows, excluded = rows_per_program(n, m, plain), None if self.excluded is None else self.excluded[i] - j.start
        for edge, tile in self._launches(n, m, plain, edges):
            softmax_weights[(cdiv(n, rows) * cdiv(m, tile.columns),)](
                self.a.tiles(i, tile.rows, tile.depth), self.b.tiles(j, tile.columns, tile.depth),
                Operand(w).tiles(slice(None), tile.rows, tile.columns // 2), self.scale, of_rows[:, i], of_columns[:, j],
                positive_weights[i], positive_weights if excluded is None else excluded, n, m, self.a.width,
                of_rows.stride(0), of_columns.stride(0), j.start - i.start, self.partner, rows,
                EDGE=edge, ONE_TOWER=self.one_tower, COLUMNS=self.symmetric, EXCLUDED=excluded is not None,
                PRECISION=self.precision, UNIT=bits, MAX_ROWS=MAX_TILES * plain.rows, **tile.options,
            )  # fmt: skip


def clip(a: Float[Tensor, "n d"], b: Float[Tensor, "n d"], scale: float | Tensor) -> Float[Tensor, ""]:
    """Return the mean of ``cross_entropy(scale * a @ b.T, arange(n))`` and the same of the transposed logits.

    The result is in nats, float32. Rows are float32, bfloat16 or float16 of any strides, d at most 4,096. A scale that
    is a tensor gets a gradient.
    """
    return _Softmax.apply(a, b, as_scalar(scale, a), True, False)


def info_nce(a: Float[Tensor, "n d"], b: Float[Tensor, "m d"], scale: float | Tensor) -> Float[Tensor, ""]:
    """Return ``cross_entropy(scale * a @ b.T, arange(n))``, as :func:`clip`; rows of b from n on are further negatives."""
    return _Softmax.apply(a, b, as_scalar(scale, a), False, False)


def nt_xent(a: Float[Tensor, "n d"], b: Float[Tensor, "n d"], scale: float | Tensor) -> Float[Tensor, ""]:
    """Return ``cross_entropy((scale * z @ z.T).fill_diagonal_(-inf), partner)`` of ``z = cat([a, b])``, as :func:`clip`."""
    z = torch.cat([a, b])
    return _Softmax.apply(z, z, as_scalar(scale, a), True, True)


class _Softmax(Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, a: Tensor, b: Tensor, scale: Tensor, symmetric: bool, one_tower: bool) -> Tensor:
        ctx.settings = precision_of(a), symmetric, one_tower, len(a) // 2 if one_tower else 0
        loss, *statistics = _losses(_pairs(a, b, scale, *ctx.settings))
        ctx.save_for_backward(a, b, scale, *statistics)
        return loss.mean()

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        a, b, scale, *statistics = ctx.saved_tensors
        return *_gradients(_pairs(a, b, scale, *ctx.settings), statistics, g), None, None


def _pairs(a: Tensor, b: Tensor, scale: Tensor, precision: str, *settings: Any) -> SoftmaxPairs:
    return SoftmaxPairs(Operand.of(a, precision), Operand.of(b, precision), scale, precision, *settings)


def _losses(pairs: SoftmaxPairs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the losses of pairs, the sums of rows and of columns, and the weights of positive pairs."""
    a, b, partner, one_tower = pairs.a, pairs.b, pairs.partner, pairs.one_tower
    count = partner or len(a)
    buffer = a.rows.new_full((2, len(a) + len(b)), NOTHING.value, dtype=torch.float32)
    of_rows, of_columns = buffer.split([len(a), len(b)], 1)
    if one_tower:
        of_columns = of_rows
    losses, positives, positive_weights = (a.rows.new_empty(k, dtype=torch.float32) for k in (count, len(a), len(a)))
    pairs.add_precise_sums(of_rows, of_columns, positives)
    finish[(cdiv(count, 128),)](
        of_rows, of_columns[:, partner:], positives, pairs.scale, losses, positive_weights, count, buffer.stride(0),
        partner, SIDES=2 if pairs.symmetric else 1, ONE_TOWER=one_tower, BLOCK=128,
    )  # fmt: skip
    return losses, of_rows, of_columns, positive_weights


def _gradients(pairs: SoftmaxPairs, statistics: Sequence[Tensor], g: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the gradients of a, of b unless it is a, and of scale."""
    a, b, scale, weights = pairs.a, pairs.b, pairs.scale, Weights.of(pairs.a, pairs.b)
    of_rows, of_columns, positive_weights = statistics
    factor = g * weights.unit / (len(a) * (2 if pairs.symmetric and not pairs.one_tower else 1))
    da, db = (torch.empty(x.rows.shape, dtype=x.rows.dtype, device=x.rows.device) for x in (a, b))
    dots = torch.empty(max(len(a), len(b)), dtype=torch.float32, device=da.device)
    of_b = torch.empty(b.rows.shape, dtype=torch.float32, device=da.device)
    of_a = of_b if pairs.one_tower else of_b.new_empty(min(weights.side, len(a)), a.width)
    for i, j in blocks(len(a), len(b), weights.side, upper=pairs.one_tower):
        w = weights.block(i, j)
        pairs.fill(w, i, j, of_rows, of_columns, positive_weights, weights.bits)
        chunk = of_a[i] if pairs.one_tower else of_a[: len(w)]
        add_product(chunk, w, b.rows[j], first=j.start == 0)
        if i != j or not pairs.one_tower:
            add_product(of_b[j], w.T, a.rows[i], first=i.start == 0)
        if j.stop == len(b):  # these rows are complete
            write_scaled(chunk, a, scale, factor, da, dots, i)
    dscale = dots[: len(a)].sum()
    if pairs.one_tower:  # each pair appears in two rows
        return da, None, dscale / 2
    write_scaled(of_b, b, scale, factor, db, dots, slice(None))
    return da, db, dscale


EMPTY = (
    2.0**20
)  # the exponent by which weights of an empty sum are 0; unlike those of infinity, differences are numbers
SMALLEST = 2.0**-126  # the least unit of weights, so that gradients of 0 are not divided by 0


class ExponentSums(Sums):
    """Accumulate sums of exponentials [n, 2], integer exponents and mantissas, a view of the [2, n] that kernels write.

    The methods are those of :mod:`contrastive_zoo.engine.softmax_arithmetic`, but for what kernels do themselves.
    """

    def empty(self, count: int, like: Tensor) -> Tensor:
        total = like.new_zeros(2, count)
        total[0] = NOTHING.value
        return total.T

    def merge(self, total: Tensor, part: Tensor) -> Tensor:
        exponent = torch.maximum(total[:, 0], part[:, 0])
        first, second = (x[:, 1] * torch.exp2(x[:, 0] - exponent) for x in (total, part))
        return torch.stack([exponent, first + second], 1)

    def log(self, total: Tensor) -> Tensor:
        """Return log-sum-exps in nats, in float64: at t = 0.01 float32 would round them, and a small loss, by 4e-6."""
        exponent, mantissa = total.double().unbind(1)
        return (exponent + mantissa.log2()) * math.log(2)

    def coefficients(self, statistics: Tensor, unit: Tensor) -> Tensor:
        """Return exponents and factors, [2, n]: G = factor · 2^(logit in bits − exponent), in the given unit."""
        exponent, mantissa, gradient = statistics.unbind(1)
        fraction, more = torch.frexp(mantissa)
        empty = mantissa == 0
        factor = (gradient / (fraction * unit)).masked_fill(empty, 0)
        return torch.stack([(exponent + more).masked_fill(empty, EMPTY), factor])


@dataclass(frozen=True)
class KernelSweep(SoftmaxSweep):
    """Compute the blocks of this rank by kernels. Rows have one partner at most."""

    exact_sums = ExponentSums()

    def largest_logit(self, rows: Tensor, columns: Tensor, scale: float | Tensor) -> None:
        """Return None: each row and column of a tile has a maximum of its own."""

    def sums(
        self, arithmetic: Any, rows: Tensor, exchange: GatherExchange | Ring, scale: float | Tensor, cached: object
    ) -> tuple[Tensor, Tensor | None, list[Tensor], list[Tensor | None]]:
        """Return sums of local rows, and of local columns, over all others; partners' float64 logits; no tiles."""
        factor, total, parts = as_scalar(scale, rows), arithmetic.empty(len(rows), rows), []
        positives = torch.zeros_like(rows[:, 0])
        for index, (block, columns) in enumerate(zip(exchange.blocks, exchange, strict=True)):
            pairs = self._pairs(index, block, rows, columns, factor, self.columnwise)
            column_total = total if self.one_tower and index == 0 else arithmetic.empty(len(columns), rows)
            if pairs is not None:
                pairs.add_precise_sums(total[block.rows].T, column_total.T, positives)
            parts.append(column_total)
        counts = [len(x) for x in self.partners.empty(rows, len(rows), self.column_shards.size)]
        logits = [positives[:count].double() * scale for count in counts]
        if not self.columnwise:
            return total, None, logits, []
        column_total = merge_at_owners(parts[0], parts[1:], exchange.blocks[1:], self.world, arithmetic.merge)
        return total, None if self.one_tower else column_total, logits, []

    def gradients(
        self,
        arithmetic: Any,
        rows: Tensor,
        exchange: GatherExchange | Ring,
        scale: float | Tensor,
        row_statistics: Tensor,
        column_statistics: Tensor | None,
        dpositives: Sequence[Tensor],
        drows: Tensor,
        dcolumns: Tensor | None,
        stored: object,
    ) -> Iterator[Tensor]:
        """Write G B into ``drows`` and Gᵀ A of the local columns into ``dcolumns``; yield Gᵀ A of each other block.

        Weights are in units of the largest gradient, which float16 can hold.
        """
        symmetric, factor = column_statistics is not None, as_scalar(scale, rows)
        columns_of_all = row_statistics[:0] if column_statistics is None else column_statistics
        if symmetric:
            columns_of_all = gather_rows(columns_of_all, self.column_shards, self.world)
        dpositives = [x.to(rows.dtype) for x in dpositives]
        gradients = [rows.new_full((1,), SMALLEST), row_statistics[:, 2], columns_of_all[:, 2], *dpositives]
        unit = torch.cat(gradients).abs().amax()
        row_weights, column_weights = (arithmetic.coefficients(x, unit) for x in (row_statistics, columns_of_all))
        by_rank = column_weights.split(self.column_shards.sizes if symmetric else [0] * self.world.size, 1)
        positive_weights = self._positive_weights(dpositives, rows) / unit
        restored = unit if isinstance(scale, Tensor) else unit * scale
        of_rows = torch.zeros_like(rows)
        for index, (block, columns) in enumerate(zip(exchange.blocks, exchange, strict=True)):
            pairs, diagonal = self._pairs(index, block, rows, columns, factor, symmetric), self.one_tower and index == 0
            of_columns = of_rows if diagonal else None if dcolumns is None else torch.zeros_like(columns)
            if pairs is not None:
                of_block = by_rank[block.ahead][:, block.columns]
                weights = (row_weights[:, block.rows], of_block, positive_weights[block.rows])
                _add_gradients(pairs, weights, of_rows[block.rows], of_columns)
            if of_columns is None:
                continue
            if index:
                yield of_columns.mul_(restored)
            elif dcolumns is not None:  # gradients of local columns that other ranks send are added to these
                dcolumns.zero_() if diagonal else torch.mul(of_columns, restored, out=dcolumns)
        if dcolumns is drows:
            drows.addcmul_(of_rows, restored)
        else:
            torch.mul(of_rows, restored, out=drows)

    def _pairs(
        self, index: int, block: RankBlock, rows: Tensor, columns: Tensor, scale: Tensor, symmetric: bool
    ) -> SoftmaxPairs | None:
        """Return the pairs of a block, of which the first is local; None if it has none."""
        rows = rows[block.rows]
        if not len(rows) or not len(columns):
            return None
        partner = self.partners.offsets[0] if index == 0 and self.partners.offsets else NO_PARTNER
        precision = "tf32" if self.dtype else precision_of(rows)
        excluded = self._excluded_columns(block)
        excluded = None if excluded is None else excluded.int()
        a, b = (Operand.of(x, precision_of(x)) for x in map(self._operand, (rows, columns)))
        return SoftmaxPairs(a, b, scale, precision, symmetric, self.one_tower and index == 0, partner, excluded)

    def _operand(self, factors: Tensor) -> Tensor:
        norms = self.inverse_norms(factors)
        return (factors if norms is None else factors * norms[:, None]).to(self.dtype or factors.dtype)

    def _positive_weights(self, dpositives: Sequence[Tensor], rows: Tensor) -> Tensor:
        """Return the negated weight of each row's positive; with one tower both rows of a pair have it."""
        weights = torch.zeros_like(rows[:, 0])
        for offset, gradient in zip(self.partners.offsets, dpositives, strict=True):
            for start in (0, offset) if self.one_tower else (0,):
                torch.neg(gradient, out=weights[start : start + len(gradient)])
        return weights


def _add_gradients(
    pairs: SoftmaxPairs, statistics: tuple[Tensor, Tensor, Tensor], of_rows: Tensor, of_columns: Tensor | None
) -> None:
    """Add W B to ``of_rows`` and Wᵀ A to ``of_columns``, the same with one tower, with the weights W of a block."""
    a, b, weights = pairs.a, pairs.b, Weights.of(pairs.a, pairs.b)
    for i, j in blocks(len(a), len(b), weights.side, upper=pairs.one_tower):
        w = weights.block(i, j)
        pairs.fill(w, i, j, *statistics, weights.bits)
        add_product(of_rows[i], w, b.rows[j], alpha=weights.unit)
        if of_columns is not None and (i != j or not pairs.one_tower):
            add_product(of_columns[j], w.T, a.rows[i], alpha=weights.unit)
