"""How many bytes of similarities all losses together may hold at a time."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ClassVar

_budget: ContextVar[int] = ContextVar("budget", default=128 * 2**20)


@contextmanager
def memory_budget(size: int) -> Iterator[None]:
    """Within it, losses hold at most ``size`` bytes of similarities at a time.

    Similarities are kept for the backward pass as far as they fit, those of all losses that wait for theirs taken
    together, which saves one product of three (of four with two towers); the others are made again, tile by tile. Losses
    that are sums over anchors make their panels as low as the budget asks for. The default is 128 MiB.

    On a processor with glibc, malloc is told to keep freed memory for the next step, twice the budget and a panel, unless
    its environment variables (``MALLOC_TRIM_THRESHOLD_``, …) say what it shall do.

    Args:
        size: bytes; 0 never keeps any.

    Raises:
        ValueError: a negative size.

    Example:
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
    """Bytes of similarities that may be held at a time."""
    return _budget.get()


class Kept:
    """Similarities that one loss keeps until its backward pass, within what others leave of the budget.

    Example:
        >>> with memory_budget(100):
        ...     one, other = Kept(), Kept()
        ...     one.takes(80), other.takes(80), other.takes(20)
        (True, False, True)
    """

    _all: ClassVar[weakref.WeakSet["Kept"]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.size = 0
        Kept._all.add(self)

    def takes(self, size: int) -> bool:
        """Whether so many more bytes fit; then they are taken."""
        fits = sum(kept.size for kept in Kept._all) + size <= budget()
        self.size += size if fits else 0
        return fits

    def release(self) -> None:
        """Leave them to others."""
        self.size = 0
