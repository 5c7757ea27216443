"""Rows over their lengths."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from contrastive_zoo.compiling import Function
from contrastive_zoo.engine.dense_mode import few, is_dense
from contrastive_zoo.engine.derivatives import once
from contrastive_zoo.engine.precision import without_autocast
from contrastive_zoo.engine.tiling import tile_bytes


def unit(x: Tensor) -> Tensor:
    """Rows over their lengths, ``torch.nn.functional.normalize(x, dim=-1)``; a zero row stays zero.

    Example:
        >>> unit(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    return torch.nn.functional.normalize(x, dim=-1) if is_dense() or few(x.numel()) else _Unit.apply(x)


class _Unit(Function):
    """y = x / |x|;  dx = (dy − y ⟨y, dy⟩) / |x|, a few rows at a time, which stay in the cache from step to step."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y, length = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1)
        for some_x, some_y, some_length in _some(x, y, length):
            torch.linalg.vector_norm(some_x, dim=-1, keepdim=True, out=some_length)
            torch.div(some_x, some_length.clamp(min=shortest), out=some_y)
        ctx.save_for_backward(x, y, length)
        return y

    @staticmethod
    @without_autocast
    def backward(ctx: Any, dy: Tensor) -> Tensor | None:
        x, y, length = ctx.saved_tensors
        dx = torch.empty_like(x)
        with torch.no_grad():
            for some_dx, some_dy, some_y, some_length in _some(dx, dy, y, length):
                along = torch.linalg.vecdot(some_y, some_dy).unsqueeze(-1).where(some_length > shortest, 0)
                torch.addcmul(some_dy, some_y, along, value=-1, out=some_dx).div_(some_length.clamp(min=shortest))
        return once(dx, x)


def _some(*rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Rows of several tensors together, as many of the first as a quarter of a tile holds."""
    first = rows[0]
    height = max(1, tile_bytes(first) // 4 // max(1, first[:1].nbytes)) if len(first) else 1
    return zip(*(x.split(height) for x in rows), strict=True)


shortest = 1e-12
"""What a row shorter than that is divided by."""
