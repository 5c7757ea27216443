"""Limit the bytes of logits that all losses together cache between forward and backward."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ClassVar

_budget: ContextVar[int] = ContextVar("budget", default=128 * 2**20)


@contextmanager
def memory_budget(size: int) -> Iterator[None]:
    """Limit the similarities that losses hold at a time to ``size`` bytes within this context.

    Losses cache their logits for the backward pass as far as the budget allows, all losses whose backward pass is
    pending together. A cached matrix saves one matmul of three (of four with two towers); other logits are recomputed
    tile by tile. Losses that are sums over anchors choose the height of their blocks by the budget. The default is
    128 MiB.

    On a CPU with glibc, the library raises malloc's trim threshold to twice the budget plus one block, so that freed
    memory stays in the process for the next step. ``CONTRASTIVE_ZOO_MALLOPT=0`` turns this off, and glibc's own
    environment variables (``MALLOC_TRIM_THRESHOLD_``, …) take precedence.

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
    """Return the bytes of similarities that losses may hold at a time."""
    return _budget.get()


class CachedLogits:
    """Count the bytes of logits that one loss caches until its backward pass, within the budget of all losses.

    Examples:
        >>> with memory_budget(100):
        ...     one, other = CachedLogits(), CachedLogits()
        ...     one.reserve(80), other.reserve(80), other.reserve(20)
        (True, False, True)
    """

    _all: ClassVar[weakref.WeakSet["CachedLogits"]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.size = 0
        CachedLogits._all.add(self)

    def reserve(self, size: int) -> bool:
        """Reserve so many more bytes if they fit into the budget, and return whether they do."""
        fits = sum(cached.size for cached in CachedLogits._all) + size <= budget()
        self.size += size if fits else 0
        return fits

    def release(self) -> None:
        """Return the bytes to the budget."""
        self.size = 0
