"""Compute softmax losses in Triton: InfoNCE, CLIP and NT-Xent in two kernels and two matmuls of cuBLAS.

With S = scale · A Bᵀ, P_i the logit of the positive pair of row i, and R_i the log-sum-exp of the row's other logits, a
row's loss is log(1 + exp(R_i − P_i)): R_i does not contain the positive, so that a small loss is precise. Columns likewise.
Weights w_ij = exp(S_ij − log-sum-exp of row i) + the same of column j; the weight of a positive pair is minus the sum of
the others in its row and column. dA = scale · W B and dB = scale · Wᵀ A, up to the divisor of the mean and the incoming
gradient.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import cdiv

from contrastive_zoo.engine.kernels.blocks import (
    MAX_TILES,
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
)
from contrastive_zoo.engine.kernels.softmax_tiles import NOTHING, finish, log_sum_exps, merge, softmax_weights
from contrastive_zoo.engine.precision import without_autocast
from contrastive_zoo.ranks.compiling import Function


@dataclass(frozen=True)
class SoftmaxPairs:
    """The pairs of rows a and columns b. Sums of exponentials are two numbers each, see ``softmax_tiles``."""

    a: Operand
    b: Operand
    scale: Tensor
    precision: str
    symmetric: bool
    """Whether columns have softmaxes over rows, too."""
    one_tower: bool
    """Whether the columns are the rows; then only pairs above the diagonal are computed, and serve both of their rows."""
    partner: int
    """How far after a row's own index the column of its positive is."""
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
