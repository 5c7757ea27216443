"""Numbers wide enough: statistics in 32 bits at least, and products of 16-bit rows at their own speed."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from contrastive_zoo.compiling import Function

P = ParamSpec("P")
R = TypeVar("R")


def wide(x: Tensor) -> Tensor:
    """x in at least 32 bits."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Logits and statistics need 32 bits: a matrix product inside must not be cast down by an autocast outside."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        device = next((x.device.type for x in args if isinstance(x, Tensor)), "cpu")
        if not torch.is_autocast_enabled(device):  # entering the context costs more than a small batch's product
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return run


def rounded(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """x as numbers of ``dtype``, held in x's own; as it is if that has not 16 bits. The gradient is not rounded.

    Example:
        >>> rounded(torch.tensor(1.001), torch.bfloat16), rounded(torch.tensor(1.001), torch.float32)
        (tensor(1.), tensor(1.0010))
    """
    return _Rounded.apply(x, dtype) if is_narrow(dtype) else x


class _Rounded(Function):
    """dx = dy, which is not rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def is_narrow(dtype: torch.dtype | None) -> bool:
    """Whether it has 16 bits."""
    return dtype in (torch.float16, torch.bfloat16)


@contextmanager
def products_of(dtype: torch.dtype | None, device: str) -> Iterator[None]:
    """Within it, matrix products of 32-bit numbers round their factors to 16 bits if ``dtype`` has, and add in 32 bits.

    That is done where the device is quicker so: a processor that multiplies bfloat16 (AVX512, AMX), and a GPU, whose
    TF32 holds the digits of either 16-bit type. Elsewhere products are those of 32 bits. The setting is the process's:
    another thread's products in these moments are rounded, too. The last thread that leaves restores what the first one
    found; a setting that somebody else made in between stays.

    Example:
        >>> with products_of(torch.float32, "cpu"):   # nothing to round
        ...     torch.eye(2) @ torch.tensor([[1.001], [1.0]])
        tensor([[1.0010],
                [1.0000]])
    """
    switch, rounding = None, None
    if device == "cpu" and dtype == torch.bfloat16:
        switch, rounding = torch.backends.mkldnn, "bf16"
    elif device == "cuda" and is_narrow(dtype):
        switch, rounding = torch.backends.cuda, "tf32"
    products: Any = getattr(switch, "matmul", None)
    if not hasattr(products, "fp32_precision"):  # torch before 2.9
        yield
        return
    with _lock:
        inside, before = _inside.get(device, (0, None))
        before = before if inside else products.fp32_precision
        _inside[device] = inside + 1, before
        if not inside:
            products.fp32_precision = rounding
    try:
        yield
    finally:
        with _lock:
            inside, before = _inside[device]
            _inside[device] = inside - 1, before
            if inside == 1 and products.fp32_precision == rounding:
                products.fp32_precision = before


_lock = threading.Lock()
_inside: dict[str, tuple[int, Any]] = {}
"""By device, how many threads are within :func:`products_of`, and the setting that the first of them found."""


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of equal batches, which no autocast casts down: not here, nor where somebody calls backward() in one.

    Example:
        >>> with torch.autocast("cpu"):
        ...     product(torch.eye(2), torch.ones(2, 1)).dtype
        torch.float32
    """
    found: Tensor = _Product.apply(a, b)
    return found


class _Product(Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        return (
            product(g, b.mT) if ctx.needs_input_grad[0] else None,
            product(a.mT, g) if ctx.needs_input_grad[1] else None,
        )
