"""Memory that one step frees stays with the process for the next one."""

import ctypes
import os
import platform

from torch import Tensor

from contrastive_zoo.engine.similarity_budget import budget
from contrastive_zoo.engine.tiling import PANEL_BYTES, TILE_BYTES

_FROM_HEAP = TILE_BYTES + 2**20
"""Bytes of the largest block that is kept: larger ones are few, and holes where they were would add to the peak."""

_TOLD_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

_kept = 0


def keep_freed_memory(like: Tensor) -> None:
    """Let malloc keep what is freed, up to twice the memory budget and a panel, if ``like`` is on a processor.

    glibc gives large blocks back to the system as soon as they are freed, and the page faults that bring them back take
    a tenth of a step, or more. Nothing is done where the C library is another one, or where its environment variables
    tell it what to keep.

    Example:
        >>> import torch
        >>> keep_freed_memory(torch.zeros(1))
    """
    global _kept
    wanted = min(2 * budget() + PANEL_BYTES, 2**31 - 1)
    if like.device.type != "cpu" or wanted <= _kept:
        return
    _kept = wanted
    if platform.libc_ver()[0] == "glibc" and not any(name in os.environ for name in _TOLD_BY_USER):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _FROM_HEAP)
        mallopt(_M_TRIM_THRESHOLD, wanted)
