"""Softmax losses in Triton: InfoNCE, CLIP and NT-Xent in two kernels and two library products.

With S = scale · A Bᵀ, P_i the logit of the positive pair of row i, and R_i the log-sum-exp of the row's other logits, a
row's loss is log(1 + exp(R_i − P_i)): the positive is no summand, so that a small loss keeps its digits. Columns likewise.
Weights w_ij = exp(S_ij − log-sum-exp of row i) + the same of column j; that of a positive pair is minus the sum of the
others in its row and column. With them dA = scale · W B and dB = scale · Wᵀ A, but for the mean's and the incoming factor.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import cdiv

from contrastive_zoo.compiling import Function
from contrastive_zoo.engine.precision import without_autocast
from contrastive_zoo.kernels.blocks import (
    MOST_TILES,
    PARTIAL_BYTES,
    Operand,
    Weights,
    add_product,
    as_scalar,
    blocks,
    checked,
    chunk,
    launches,
    precision_of,
    scaled,
    tiles_for,
)
from contrastive_zoo.kernels.softmax_tiles import NOTHING, finish, log_sum_exps, merge, softmax_weights


def clip(a: Float[Tensor, "n d"], b: Float[Tensor, "n d"], scale: float | Tensor) -> Float[Tensor, ""]:
    """Mean of ``cross_entropy(scale * a @ b.T, arange(n))`` and the same of the transposed logits.

    Args:
        a: float32, bfloat16 or float16; d at most 4,096; any strides.
        b: row i belongs to row i of a.
        scale: positive; a tensor gets a gradient.

    Returns:
        Nats, float32.

    Raises:
        ValueError: another shape or dtype, or rows on different devices.
    """
    checked("clip", a, b, same_length=True)
    return _Softmax.apply(a, b, as_scalar(scale, a), True, False)


def info_nce(a: Float[Tensor, "n d"], b: Float[Tensor, "m d"], scale: float | Tensor) -> Float[Tensor, ""]:
    """``cross_entropy(scale * a @ b.T, arange(n))``.

    Args:
        a: float32, bfloat16 or float16; d at most 4,096; any strides.
        b: row i belongs to row i of a; m ≥ n, rows beyond n are negatives of all.
        scale: positive; a tensor gets a gradient.

    Returns:
        Nats, float32.

    Raises:
        ValueError: another shape or dtype, rows on different devices, or fewer rows of b than of a.
    """
    checked("info_nce", a, b)
    if len(b) < len(a):
        raise ValueError(f"info_nce: every row of a needs its row of b, got {len(a)} and {len(b)} rows.")
    return _Softmax.apply(a, b, as_scalar(scale, a), False, False)


def nt_xent(a: Float[Tensor, "n d"], b: Float[Tensor, "n d"], scale: float | Tensor) -> Float[Tensor, ""]:
    """``cross_entropy((scale * z @ z.T).fill_diagonal_(-inf), partner)`` of ``z = cat([a, b])``.

    Args:
        a: float32, bfloat16 or float16; d at most 4,096; any strides.
        b: the other view, row i belongs to row i of a.
        scale: positive; a tensor gets a gradient.

    Returns:
        Nats, float32.

    Raises:
        ValueError: another shape or dtype, or rows on different devices.
    """
    checked("nt_xent", a, b, same_length=True)
    z = torch.cat([a, b])
    return _Softmax.apply(z, z, as_scalar(scale, a), True, True)


class _Softmax(Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, a: Tensor, b: Tensor, scale: Tensor, symmetric: bool, one_tower: bool) -> Tensor:
        precision = precision_of(a)
        ctx.pairs = _Pairs(precision, symmetric, one_tower)
        loss, *statistics = ctx.pairs.losses(Operand.of(a, precision), Operand.of(b, precision), scale)
        ctx.save_for_backward(a, b, scale, *statistics)
        return loss.mean()

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        a, b, scale, *statistics = ctx.saved_tensors
        left, right = (Operand.of(x, ctx.pairs.precision) for x in (a, b))
        return *ctx.pairs.gradients(left, right, scale, *statistics, g), None, None


@dataclass(frozen=True)
class _Pairs:
    """All pairs of rows a and b, block by block. A sum of exponentials is a column of two numbers, see ``softmax_tiles``."""

    precision: str
    symmetric: bool
    """Whether columns look for their rows, too."""
    one_tower: bool
    """Whether b is a, in which row i and row i + n/2 belong together."""

    def partner(self, a: Operand) -> int:
        """How much further the partner of a row is."""
        return len(a) // 2 if self.one_tower else 0

    def losses(self, a: Operand, b: Operand, scale: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of each pair; then sums of rows and of columns, and pulls of pairs."""
        partner = self.partner(a)
        count = partner or len(a)
        room = a.rows.new_full((2, len(a) + 2 * len(b)), NOTHING.value, dtype=torch.float32)
        of_rows, of_columns, again = room.split([len(a), len(b), len(b)], 1)
        if self.one_tower:
            of_columns = of_rows
        losses, positives, pulls = (a.rows.new_empty(k, dtype=torch.float32) for k in (count, len(a), len(a)))
        lost = a.rows.new_zeros((), dtype=torch.int32)
        self._add_sums(a, b, scale, of_rows, of_columns, positives, lost)
        if self.symmetric:
            # A column's sum that lost terms is made again as a row's, with a maximum of its own; else this does nothing.
            swapped = _Pairs(self.precision, False, self.one_tower)
            swapped._add_sums(b, a, scale, again, again, torch.empty_like(positives), lost, if_lost=True)
        finish[(cdiv(count, 128),)](
            of_rows, of_columns[:, partner:], again[:, partner:], again, lost, positives, scale, losses, pulls, count,
            room.stride(0), room.stride(0), room.stride(0), partner,
            SIDES=2 if self.symmetric else 1, ONE_TOWER=self.one_tower, BLOCK=128,
        )  # fmt: skip
        return losses, of_rows, of_columns, pulls

    def _add_sums(
        self,
        a: Operand,
        b: Operand,
        scale: Tensor,
        of_rows: Tensor,
        of_columns: Tensor,
        positives: Tensor,
        lost: Tensor,
        if_lost: bool = False,
    ) -> None:
        plain, edges = tiles_for(a.rows, self.precision)
        side = math.isqrt(PARTIAL_BYTES * plain.columns // 8) // plain.rows * plain.rows
        # of one tower only what is above the diagonal; a sum that is made again is that of a whole row
        upper = self.one_tower and not if_lost
        for i, j in blocks(len(a), len(b), side, upper=upper):
            n, m = i.stop - i.start, j.stop - j.start
            rows = chunk(n, m, plain)
            shape = (2, cdiv(m, plain.columns), n)
            by_row = of_rows.new_full(shape, NOTHING.value) if upper and i == j else of_rows.new_empty(shape)
            by_column = of_rows.new_empty(2, cdiv(n, rows), m) if self.symmetric else by_row
            for edge, tile in launches(n, m, plain, edges):
                log_sum_exps[(cdiv(n, rows) * cdiv(m, tile.columns),)](
                    a.tiles(i, tile.rows, tile.depth), b.tiles(j, tile.columns, tile.depth), scale,
                    by_row, by_column, positives[i], lost, n, m, a.width, j.start - i.start, self.partner(a), rows,
                    EDGE=edge, ONE_TOWER=self.one_tower, UPPER=upper and i == j, COLUMNS=self.symmetric,
                    IF_LOST=if_lost, PRECISION=self.precision, WARPS=min(tile.warps, tile.rows // 16), **tile.options,
                )  # fmt: skip
            merged = [(by_row, of_rows[:, i]), (by_column, of_columns[:, j])]
            for parts, out in merged[: 2 if self.symmetric else 1]:
                merge[(cdiv(out.shape[1], 32),)](
                    parts, out, lost, parts.shape[1], out.shape[1], out.stride(0),
                    IF_LOST=if_lost, BLOCK_N=32, BLOCK_P=64, num_warps=4,
                )  # fmt: skip

    def gradients(
        self, a: Operand, b: Operand, scale: Tensor, of_rows: Tensor, of_columns: Tensor, pulls: Tensor, g: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Of a, of b unless it is a, and of scale."""
        weights = Weights.of(a, b)
        factor = g * weights.unit / (len(a) * (2 if self.symmetric and not self.one_tower else 1))
        da, db = (torch.empty(x.rows.shape, dtype=x.rows.dtype, device=x.rows.device) for x in (a, b))
        dots = torch.empty(max(len(a), len(b)), dtype=torch.float32, device=da.device)
        of_b = torch.empty(b.rows.shape, dtype=torch.float32, device=da.device)
        of_a = of_b if self.one_tower else of_b.new_empty(min(weights.side, len(a)), a.width)
        for i, j in blocks(len(a), len(b), weights.side, upper=self.one_tower):
            w = weights.block(i, j)
            self._fill(w, i, j, a, b, scale, of_rows, of_columns, pulls, weights.bits)
            some = of_a[i] if self.one_tower else of_a[: len(w)]
            add_product(some, w, b.rows[j], first=j.start == 0)
            if i != j or not self.one_tower:
                add_product(of_b[j], w.T, a.rows[i], first=i.start == 0)
            if j.stop == len(b):  # nothing is added to these rows any more
                scaled(some, a, scale, factor, da, dots, i)
        dscale = dots[: len(a)].sum()
        if self.one_tower:  # a pair stands in two rows
            return da, None, dscale / 2
        scaled(of_b, b, scale, factor, db, dots, slice(None))
        return da, db, dscale

    def _fill(
        self,
        w: Tensor,
        i: slice,
        j: slice,
        a: Operand,
        b: Operand,
        scale: Tensor,
        of_rows: Tensor,
        of_columns: Tensor,
        pulls: Tensor,
        bits: int,
    ) -> None:
        n, m = w.shape
        plain, edges = tiles_for(a.rows, self.precision)
        rows = chunk(n, m, plain)
        for edge, tile in launches(n, m, plain, edges):
            softmax_weights[(cdiv(n, rows) * cdiv(m, tile.columns),)](
                a.tiles(i, tile.rows, tile.depth), b.tiles(j, tile.columns, tile.depth),
                Operand(w).tiles(slice(None), tile.rows, tile.columns // 2), scale, of_rows[:, i], of_columns[:, j],
                pulls[i], n, m, a.width, of_rows.stride(0), of_columns.stride(0), j.start - i.start, self.partner(a), rows,
                EDGE=edge, ONE_TOWER=self.one_tower, COLUMNS=self.symmetric, PRECISION=self.precision, UNIT=bits,
                MOST=MOST_TILES * plain.rows, **tile.options,
            )  # fmt: skip
