"""Softmax losses in Triton: InfoNCE, CLIP and NT-Xent in two kernels and two library products.

With S = scale · A Bᵀ, P_i the logit of the positive pair of row i, and R_i, C_i the log-sum-exps of the other logits of
row and column i, a row's loss is log(1 + exp(R_i − P_i)): the positive is no summand, so that a small loss keeps its digits.
Weights w_ij = exp(S_ij − log-sum-exp of row i) + the same of column j; that of a positive pair is minus the sum of the
others in its row and column. With them dA = scale · W B, dB = scale · Wᵀ A.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import cdiv

from contrastive_zoo.engine.precision import without_autocast
from contrastive_zoo.kernels import blocks as _blocks
from contrastive_zoo.kernels.blocks import Operand, Tile, add_product, blocks, chunk, weight_side
from contrastive_zoo.kernels.checks import as_scalar, checked, precision_of, tiles_for
from contrastive_zoo.kernels.softmax_tiles import LOG2E, log_sum_exps, merge, softmax_weights

_LOG2E = LOG2E.value


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


class _Softmax(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, a: Tensor, b: Tensor, scale: Tensor, columns: bool, one_tower: bool) -> Tensor:
        pairs = _Pairs(Operand.of(a), Operand.of(b), scale, precision_of(a), columns, one_tower)
        r, c, positives = pairs.log_sum_exps()
        positives = positives * scale * _LOG2E
        # in bits so far; a loss is in nats
        losses = F.softplus((r - positives) / _LOG2E)
        pulls, loss = torch.sigmoid((r - positives) / _LOG2E), losses.mean()
        if one_tower:
            half = pulls.view(2, -1)
            pulls = half.sum(0).repeat(2)
        elif columns:
            loss = (loss + F.softplus((c - positives) / _LOG2E).mean()) / 2
            pulls = pulls + torch.sigmoid((c - positives) / _LOG2E)
        # with the positive from here on
        r = torch.logaddexp2(r, positives)
        c = r if one_tower else torch.logaddexp2(c, positives) if columns else c
        ctx.save_for_backward(a, b, scale, r, c, pulls)
        ctx.settings = pairs.precision, columns, one_tower
        return loss

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        a, b, scale, r, c, pulls = ctx.saved_tensors
        precision, columns, one_tower = ctx.settings
        pairs = _Pairs(Operand.of(a), Operand.of(b), scale, precision, columns, one_tower)
        g = g / (len(a) * (2 if columns and not one_tower else 1))
        da, db, dscale = pairs.gradients(r, c, pulls, g)
        return da, db, dscale.to(scale.dtype), None, None


@dataclass(frozen=True)
class _Pairs:
    """All pairs of a row of a and a row of b, in blocks; statistics are float32, in bits."""

    a: Operand
    b: Operand
    scale: Tensor
    precision: str
    columns: bool
    """Whether columns look for their rows, too."""
    one_tower: bool
    """Whether b is a, in which row i and row i + n/2 belong together."""

    @property
    def partner(self) -> int:
        return len(self.a.rows) // 2 if self.one_tower else 0

    def log_sum_exps(self) -> tuple[Tensor, Tensor, Tensor]:
        """R, C and products of positive pairs."""
        a, b = self.a.rows, self.b.rows
        r, c, again = (a.new_full((k,), -torch.inf, dtype=torch.float32) for k in (len(a), len(b), len(b)))
        positives = a.new_empty(len(a), dtype=torch.float32)
        lost = a.new_zeros((), dtype=torch.int32)
        tile, _ = tiles_for(a, self.precision)
        side = tile.rows * math.isqrt(_blocks.PARTIAL_BYTES * tile.columns // 4) // tile.rows
        for i, j in blocks(len(a), len(b), side, upper=self.one_tower):
            self._block_sums(i, j, r, c if not self.one_tower else r, positives, lost, False)
        if self.one_tower:
            positives[self.partner :] = positives[: self.partner]
        if self.columns:
            # a column's sum that lost terms is made again as a row's, which has a maximum of its own; else this does nothing
            swapped = _Pairs(self.b, self.a, self.scale, self.precision, False, self.one_tower)
            for j, i in blocks(len(b), len(a), side):
                swapped._block_sums(j, i, again, again, torch.empty_like(positives), lost, True)
            c = torch.where(lost > 0, again, r if self.one_tower else c)
        return (c if self.one_tower else r), c, positives

    def _block_sums(
        self, i: slice, j: slice, r: Tensor, c: Tensor, positives: Tensor, lost: Tensor, if_lost: bool
    ) -> None:
        n, m = i.stop - i.start, j.stop - j.start
        upper = self.one_tower and i == j and not if_lost
        for_all, for_edges = tiles_for(self.a.rows, self.precision)
        rows = chunk(n, m, for_all)
        by_row = r.new_full((cdiv(m, for_all.columns), n), -torch.inf) if upper else r.new_empty(
            (cdiv(m, for_all.columns), n)
        )
        by_column = r.new_empty((cdiv(n, rows), m)) if self.columns else by_row
        for edge, tile in self._launches(n, m, rows, for_all, for_edges):
            log_sum_exps[(cdiv(n, rows) * cdiv(m, tile.columns),)](
                self.a.tiles(i, tile.rows, tile.depth), self.b.tiles(j, tile.columns, tile.depth), self.scale,
                by_row, by_column, positives[i], lost, n, m, self.a.rows.shape[1], j.start - i.start, self.partner, rows,
                EDGE=edge, ONE_TOWER=self.one_tower, UPPER=upper, COLUMNS=self.columns, IF_LOST=if_lost,
                PRECISION=self.precision, WARPS=min(tile.warps, tile.rows // 16), **tile.options,
            )  # fmt: skip
        for parts, out in [(by_row, r[i]), (by_column, c[j])][: 2 if self.columns else 1]:
            merge[(cdiv(len(out), 128),)](
                parts, out, lost, len(parts), len(out), IF_LOST=if_lost, BLOCK_N=128, BLOCK_P=32, num_warps=4
            )

    def _launches(self, n: int, m: int, rows: int, for_all: Tile, for_edges: Tile) -> list[tuple[int, Tile]]:
        """One launch without masks and one for the edges; for few pairs one with masks for all."""
        if n <= rows or for_all == for_edges:
            return [(2, for_edges)]
        return [(0, for_all), (1, for_edges)]

    def gradients(self, r: Tensor, c: Tensor, pulls: Tensor, g: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Of a, of b unless it is a, and of scale, for weights that count g each."""
        a, b = self.a.rows, self.b.rows
        side, unit = weight_side(a.dtype), 14 if a.dtype == torch.float16 else 0
        step = 16 // a.element_size()
        room = a.new_empty(min(side, len(a)), cdiv(min(side, len(b)), step) * step)
        factor = g * self.scale * 2.0**-unit
        da = torch.empty_like(a, memory_format=torch.contiguous_format)
        db32 = torch.empty_like(b, dtype=torch.float32, memory_format=torch.contiguous_format)
        dscale = torch.zeros((), device=a.device)
        da32 = db32 if self.one_tower else db32.new_empty(min(side, len(a)), a.shape[1])
        for i, j in blocks(len(a), len(b), side, upper=self.one_tower):
            w = room[: i.stop - i.start, : j.stop - j.start]
            self._block_weights(i, j, w, r, c, pulls, unit)
            if self.one_tower:
                add_product(db32[i], w, a[j], first=i.start == j.start == 0)
                if i != j:
                    add_product(db32[j], w.T, a[i], first=i.start == 0)
                continue
            add_product(da32[: len(w)], w, b[j], first=j.start == 0)
            add_product(db32[j], w.T, a[i], first=i.start == 0)
            if j.stop == len(b):
                dscale += torch.linalg.vecdot(da32[: len(w)], a[i].float()).sum()
                torch.mul(da32[: len(w)], factor, out=da[i])
        if self.one_tower:
            for i in range(0, len(a), side):
                dscale += torch.linalg.vecdot(db32[i : i + side], a[i : i + side].float()).sum() / 2
            return torch.mul(db32, factor, out=da), None, dscale * g * 2.0**-unit
        db = torch.mul(db32, factor, out=torch.empty_like(b, memory_format=torch.contiguous_format))
        return da, db, dscale * g * 2.0**-unit

    def _block_weights(
        self, i: slice, j: slice, w: Tensor, r: Tensor, c: Tensor, pulls: Tensor, unit: int
    ) -> None:
        n, m = w.shape
        for_all, for_edges = tiles_for(self.a.rows, self.precision)
        rows = chunk(n, m, for_all)
        for edge, tile in self._launches(n, m, rows, for_all, for_edges):
            softmax_weights[(cdiv(n, rows) * cdiv(m, tile.columns),)](
                self.a.tiles(i, tile.rows, tile.depth), self.b.tiles(j, tile.columns, tile.depth),
                Operand(w).tiles(slice(None), tile.rows, tile.columns), self.scale, r[i], c[j], pulls[i], n, m,
                self.a.rows.shape[1], j.start - i.start, self.partner, rows,
                EDGE=edge, ONE_TOWER=self.one_tower, COLUMNS=self.columns, PRECISION=self.precision, UNIT=unit,
                MOST=_blocks.MOST_TILES * for_all.rows, **tile.options,
            )  # fmt: skip
