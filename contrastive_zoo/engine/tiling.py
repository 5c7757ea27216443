"""Cut a similarity matrix into tiles or blocks, and limit the memory that they take."""

import ctypes
import math
import platform
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from contrastive_zoo.ranks.compiling import Function, differentiable_once, inner_graph, saved_tensors_are_hooked
from contrastive_zoo.ranks.row_checks import is_integer

BLOCK_BYTES = 32 * 2**20  # largest size of one block of similarities
TILE_BYTES = 4 * 2**20  # and of a tile, so that it stays in a CPU's cache; a GPU's tiles are 32 times as large


def tiles(rows: int, columns: int, like: Tensor, *, upper: bool = False) -> Iterator[tuple[slice, slice]]:
    """Yield the tiles of a matrix strip by strip; with ``upper`` those above the diagonal, and square ones on it."""
    height, width = tile_size(like.dtype.itemsize, on_cpu=like.is_cpu)
    for top in range(0, rows, height):
        strip, left = slice(top, min(rows, top + height)), 0
        if upper:
            yield strip, strip
            left = strip.stop
        for start in range(left, columns, width):
            yield strip, slice(start, min(columns, start + width))


def tile_size(itemsize: int, *, on_cpu: bool) -> tuple[int, int]:
    """Return height and width of a tile: powers of two, the width two or four times the height."""
    elements = tile_bytes(on_cpu=on_cpu) // itemsize
    height = 2 ** max(0, int(math.log2(max(1, elements // 2)) / 2))
    return height, max(1, elements // height)


def tile_scratch(rows: Tensor, columns: int) -> Tensor:
    """Return memory for one tile at a time of rows and so many columns."""
    height, width = tile_size(rows.dtype.itemsize, on_cpu=rows.is_cpu)
    return rows.new_empty(min(height, len(rows)) * min(width, columns))


def tile_bytes(*, on_cpu: bool) -> int:
    return TILE_BYTES if on_cpu else 32 * TILE_BYTES


def block_rows(columns: int, dtype: torch.dtype) -> int:
    return max(1, BLOCK_BYTES // max(1, columns * dtype.itemsize))


def row_blocks(rows: int, columns: int, dtype: torch.dtype) -> Iterator[slice]:
    """Yield slices of rows whose similarities to all columns fit into :data:`BLOCK_BYTES`."""
    height = block_rows(columns, dtype)
    for start in range(0, rows, height):
        yield slice(start, min(rows, start + height))


# matrices as large as the block's similarities that a loss makes: Circle, more than most, a usual loss, and a simple one
MATRICES_PER_BLOCK, USUAL_MATRICES, FEWEST_MATRICES = 16, 8.0, 4
# height of a block below which its fixed cost, a pass over the gradients of all candidates, is noticeable
LOW_BLOCK = 64


def block_height(row_bytes: int, available: int, *, on_cpu: bool) -> int:
    """Return how many anchors a block has whose similarities take so many bytes each, with all that a loss makes of them."""
    available = max(TILE_BYTES, available)
    if on_cpu:  # beyond a CPU's cache every pass takes longer
        available = min(available, BLOCK_BYTES)
    low = min(LOW_BLOCK, available // (FEWEST_MATRICES * row_bytes))  # which may exceed its share
    return max(1, available // (MATRICES_PER_BLOCK * row_bytes), low)


def by_blocks(
    function: Callable[..., Tensor], height: int, rows: Sequence[Tensor], others: Sequence[Tensor], *, plain: bool
) -> Float[Tensor, "n ..."]:
    """Return ``function(*rows, *others)``: at once if ``plain``; else so many rows at a time, again in the backward pass."""
    if plain or len(rows[0]) <= height:
        return function(*rows, *others)
    return _ByBlocks.apply(function, height, len(rows), *rows, *others)


class _ByBlocks(Function):
    # no graph of a block, and no small tensor, outlives the next one: malloc then reuses the memory of its matrices

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], height: int, count: int, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.function, ctx.count = function, count
        ctx.blocks = [slice(start, start + height) for start in range(0, len(inputs[0]), height)]
        results: Tensor | None = None
        for block in ctx.blocks:
            result = function(*(x[block] for x in inputs[:count]), *inputs[count:])
            results = inputs[0].new_empty(len(inputs[0]), *result.shape[1:]) if results is None else results
            results[block] = result
        assert results is not None
        return results

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        inputs, learns = ctx.saved_tensors, ctx.needs_input_grad[3:]
        gradients = [torch.zeros_like(x) if needs else None for x, needs in zip(inputs, learns, strict=True)]
        for block in ctx.blocks:
            parts = [x[block] if i < ctx.count else x for i, x in enumerate(inputs)]
            with inner_graph():
                parts = [x.detach().requires_grad_(needs) for x, needs in zip(parts, learns, strict=True)]
                result = ctx.function(*parts)
            of_block = iter(torch.autograd.grad(result, [x for x in parts if x.requires_grad], g.detach()[block]))
            for i, total in enumerate(gradients):
                if total is not None:
                    (total[block] if i < ctx.count else total).add_(next(of_block))
        return None, None, None, *(differentiable_once(x, *inputs) for x in gradients)


def tile_of(scratch: Tensor, i: slice, j: slice) -> Tensor:
    """Return a view of memory for one tile at a time, in the shape of rows i and columns j."""
    height, width = i.stop - i.start, j.stop - j.start
    return scratch[: height * width].view(height, width)


_budget: ContextVar[int] = ContextVar("budget", default=128 * 2**20)


@contextmanager
def memory_budget(size: int) -> Iterator[None]:
    """Limit the similarities that losses hold at a time to ``size`` bytes within this context.

    Losses cache their logits for the backward pass as far as the budget allows, all losses whose backward pass is
    pending together. A cached matrix saves one matmul of three (of four with two towers); other logits are recomputed
    tile by tile. Losses that are sums over anchors choose the height of their blocks by the budget. The default is
    128 MiB.

    Args:
        size: bytes; 0 caches nothing.

    Raises:
        ValueError: a negative size.

    Examples:
        >>> import torch
        >>> import contrastive_zoo as cz
        >>> with memory_budget(2**30):
        ...     cz.InfoNCE(temperature=1.0)(torch.eye(2), torch.eye(2))
        tensor(0.3133)
    """
    if size < 0:
        raise ValueError(f"memory_budget: size is a number of bytes, 0 or more, got {size}.")
    token = _budget.set(size)
    try:
        yield
    finally:
        _budget.reset(token)


def budget() -> int:
    return _budget.get()


def keep_freed_memory(size: int = 300_000_000) -> bool:
    """Let glibc's malloc keep up to ``size`` bytes that this process has freed; return whether this system has glibc.

    By default malloc returns blocks as large as a tile to the system and fetches them again in the next step. On a CPU
    this takes 4 to 17 % of the time of a loss of 2,048 to 8,192 embeddings. Call this function once, before the training.
    A model needs it rarely: once the program has freed a block of nearly 32 MiB, malloc keeps later ones by itself.
    It replaces ``MALLOC_TRIM_THRESHOLD_`` and ``MALLOC_MMAP_THRESHOLD_`` for the whole process.

    Args:
        size: bytes.

    Raises:
        ValueError: a size that is not in 0 … 2³¹ − 1.

    Examples:
        >>> keep_freed_memory(-1)
        Traceback (most recent call last):
        ...
        ValueError: keep_freed_memory: size is a number of bytes, 0 … 2**31 - 1, got -1.
    """
    if not is_integer(size, at_least=0, at_most=2**31 - 1):
        raise ValueError(f"keep_freed_memory: size is a number of bytes, 0 … 2**31 - 1, got {size!r}.")
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # larger blocks are rare, and the holes that they leave in the heap would add to the peak memory
    return bool(mallopt(_M_MMAP_THRESHOLD, TILE_BYTES + 2**20) and mallopt(_M_TRIM_THRESHOLD, size))


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


class CachedLogits:
    """Count the bytes of logits that one loss caches until its backward pass, within the budget of all losses.

    Nothing is cached in a checkpoint, which must find as many saved tensors as the first time.
    """

    _all: ClassVar[weakref.WeakSet["CachedLogits"]] = weakref.WeakSet()

    def __init__(self, *, learns: bool) -> None:
        self.size, self.is_used = 0, learns and not saved_tensors_are_hooked()
        CachedLogits._all.add(self)

    def reserve(self, size: int) -> bool:
        """Reserve so many more bytes if they fit into the budget, and return whether they do."""
        fits = self.is_used and sum(cached.size for cached in CachedLogits._all) + size <= budget()
        self.size += size if fits else 0
        return fits

    def release(self) -> None:
        self.size = 0
