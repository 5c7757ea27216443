"""Sweep over the similarities that one of several ranks computes, by kernels: block after block, as their columns arrive."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contrastive_zoo.engine.exchange import GatherExchange, RankBlock, Ring, merge_at_owners
from contrastive_zoo.engine.kernels.blocks import (
    NO_PARTNER,
    Operand,
    Weights,
    add_product,
    as_scalar,
    blocks,
    precision_of,
)
from contrastive_zoo.engine.kernels.softmax import SoftmaxPairs
from contrastive_zoo.engine.kernels.softmax_tiles import NOTHING
from contrastive_zoo.engine.precision import is_16_bit
from contrastive_zoo.engine.softmax_arithmetic import Sums
from contrastive_zoo.engine.softmax_sweep import SoftmaxSweep
from contrastive_zoo.ranks.transport import gather_rows

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
        """Return sums of local rows over all columns, of local columns over all rows, partners' logits, and no tiles.

        Logits are in float64, as the logarithms of sums.
        """
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
        precision = "tf32" if is_16_bit(self.dtype) else precision_of(rows)
        excluded = self._excluded_columns(block)
        excluded = None if excluded is None else excluded.int()
        arguments = [x.to(self.dtype) if is_16_bit(self.dtype) else x for x in (rows, columns)]
        a, b = (Operand.of(x, precision_of(x)) for x in arguments)
        return SoftmaxPairs(a, b, scale, precision, symmetric, self.one_tower and index == 0, partner, excluded)

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
