"""Divide embeddings by their norms."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from contrastive_zoo.compiling import Function
from contrastive_zoo.engine.dense_mode import is_dense, is_small_batch
from contrastive_zoo.engine.derivatives import differentiable_once
from contrastive_zoo.engine.precision import without_autocast
from contrastive_zoo.engine.tiling import tile_bytes

MIN_NORM = 1e-12
"""Rows with a smaller norm are divided by this number, as ``torch.nn.functional.normalize`` does."""


def unit_rows(x: Tensor) -> Tensor:
    """Return ``torch.nn.functional.normalize(x, dim=-1)``; a zero row stays zero.

    Examples:
        >>> unit_rows(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    if is_dense() or is_small_batch(x.numel()):
        return torch.nn.functional.normalize(x, dim=-1)
    return _UnitRows.apply(x)


class _UnitRows(Function):
    """Compute y = x / |x| and dx = (dy − y ⟨y, dy⟩) / |x| chunk by chunk, so that a chunk stays in the cache."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y, norm = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1)
        for x_chunk, y_chunk, norm_chunk in _chunks(x, y, norm):
            torch.linalg.vector_norm(x_chunk, dim=-1, keepdim=True, out=norm_chunk)
            torch.div(x_chunk, norm_chunk.clamp(min=MIN_NORM), out=y_chunk)
        ctx.save_for_backward(x, y, norm)
        return y

    @staticmethod
    @without_autocast
    def backward(ctx: Any, dy: Tensor) -> Tensor | None:
        x, y, norm = ctx.saved_tensors
        dx = torch.empty_like(x)
        with torch.no_grad():
            for dx_chunk, dy_chunk, y_chunk, norm_chunk in _chunks(dx, dy, y, norm):
                radial = torch.linalg.vecdot(y_chunk, dy_chunk).unsqueeze(-1).where(norm_chunk >= MIN_NORM, 0)
                torch.addcmul(dy_chunk, y_chunk, radial, value=-1, out=dx_chunk).div_(norm_chunk.clamp(min=MIN_NORM))
        return differentiable_once(dx, x)


def _chunks(*rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same rows of several tensors, as many at a time as a quarter of a tile holds of the first tensor.

    Examples:
        >>> [[len(x) for x, in _chunks(torch.empty(3, tile_bytes(torch.empty(0)) // y))] for y in (16, 32)]   # 4 bytes each
        [[1, 1, 1], [2, 1]]
    """
    first = rows[0]
    height = max(1, tile_bytes(first) // 4 // max(1, first[:1].nbytes))
    return zip(*(x.split(height) for x in rows), strict=True)
