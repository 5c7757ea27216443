"""Prepare embeddings: unit length, statistics in at least float32, matmuls of 16-bit embeddings at 16-bit speed."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from contrastive_zoo.engine.implementation import is_dense
from contrastive_zoo.engine.tiling import tile_bytes
from contrastive_zoo.ranks.compiling import Function, differentiable_once
from contrastive_zoo.ranks.devices import has_float64

P = ParamSpec("P")
R = TypeVar("R")


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float32 if it has 16 bits, otherwise x itself."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Disable autocast within a function: logits and statistics need 32 bits, so no matmul inside may be cast down."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        device = next((x.device.type for x in args if isinstance(x, Tensor)), "cpu")
        if not torch.is_autocast_enabled(device):  # entering the context costs more than a small batch's matmul
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return run


@without_autocast
def concatenated(*tensors: Tensor, dim: int = 0) -> Tensor:
    """Return ``torch.cat(tensors, dim)``, which autocast to bfloat16 refuses of float16, and the reverse."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def is_16_bit(dtype: torch.dtype | None) -> bool:
    return dtype in (torch.float16, torch.bfloat16)


@contextmanager
def matmul_rounding(dtype: torch.dtype | None, device: str) -> Iterator[None]:
    """Round the factors of float32 matmuls to 16 bits if ``dtype`` has 16, where the device is faster so, in this context.

    The setting belongs to the process. The last thread that leaves restores what the first one found, unless other code
    has set something else in between.
    """
    backend, rounding = None, None
    if device == "cpu" and dtype == torch.bfloat16:
        backend, rounding = torch.backends.mkldnn, "bf16"
    elif device == "cuda" and is_16_bit(dtype):
        backend, rounding = torch.backends.cuda, "tf32"
    matmuls: Any = getattr(backend, "matmul", None)
    if not hasattr(matmuls, "fp32_precision"):  # torch before 2.9
        yield
        return
    with _lock:
        threads, before = _active_threads.get(device, (0, None))
        before = before if threads else matmuls.fp32_precision
        _active_threads[device] = threads + 1, before
        if not threads:
            matmuls.fp32_precision = rounding
    try:
        yield
    finally:
        with _lock:
            threads, before = _active_threads[device]
            _active_threads[device] = threads - 1, before
            if threads == 1 and matmuls.fp32_precision == rounding:
                matmuls.fp32_precision = before


_lock = threading.Lock()
# by device: how many threads are within matmul_rounding, and the setting that the first of them found
_active_threads: dict[str, tuple[int, Any]] = {}


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` of equal batches; autocast casts neither this matmul nor those of its backward pass down."""
    result: Tensor = _Matmul.apply(a, b)
    return result


class _Matmul(Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        return (
            matmul(g, b.mT) if ctx.needs_input_grad[0] else None,
            matmul(a.mT, g) if ctx.needs_input_grad[1] else None,
        )


MIN_NORM = 1e-12  # rows with a smaller norm are divided by this number, as torch.nn.functional.normalize does


def unit_rows(x: Tensor) -> Tensor:
    """Return ``torch.nn.functional.normalize(x, dim=-1)``; a zero row stays zero."""
    if is_dense() or x.numel() <= SMALL_ELEMENTS:
        return torch.nn.functional.normalize(x, dim=-1)
    return _UnitRows.apply(x)


SMALL_ELEMENTS = 2**16  # elements up to which autograd is quicker than passes chunk by chunk


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
    """Yield the same rows of several tensors, as many at a time as a quarter of a tile holds of the first tensor."""
    first = rows[0]
    height = max(1, tile_bytes(on_cpu=first.is_cpu) // 4 // max(1, first[:1].nbytes))
    return zip(*(x.split(height) for x in rows), strict=True)


def sum_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which x is added up: float64, or float32 on devices without, whose means err by about 1e-6."""
    return torch.float64 if has_float64(x.device) else torch.float32


def in_float64(x: Tensor) -> Tensor:
    """Return x in float64, on the CPU if its device has no float64."""
    return x.double() if has_float64(x.device) else x.cpu().double()
