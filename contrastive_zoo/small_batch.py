"""Which batches every rank computes whole: splitting their loss would cost more messages than it saves arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

SMALL_BATCH = 2**28
"""Multiplications of the largest small batch; measured on gloo, where they take as long as the messages that they save."""

PER_SIMILARITY = 64
"""Multiplications that take as long as one similarity's exponential, sums and weights."""


def is_small(rows: int, width: int) -> bool:
    """Whether every rank computes all of the loss, given the number of rows on all ranks and their width.

    Examples:
        >>> is_small(1_000, 128), is_small(10_000, 128)
        (True, False)
    """
    return rows**2 * (width + PER_SIMILARITY) <= SMALL_BATCH


@contextmanager
def splitting(always: bool) -> Iterator[None]:
    """Within it ranks split the loss of every batch if ``always``, otherwise that of large batches; for tests.

    It must be entered on every rank alike.

    Examples:
        >>> with splitting(always=True):
        ...     is_small(1, 1)
        False
    """
    global SMALL_BATCH
    before, SMALL_BATCH = SMALL_BATCH, -1 if always else 2**28
    try:
        yield
    finally:
        SMALL_BATCH = before
