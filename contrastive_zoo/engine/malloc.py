"""Keep freed memory in the process, so that the next step does not fetch it from the system again."""

import ctypes
import os
import platform

from torch import Tensor

from contrastive_zoo.engine.similarity_budget import budget
from contrastive_zoo.engine.tiling import BLOCK_BYTES, TILE_BYTES

_HEAP_BLOCK_BYTES = TILE_BYTES + 2**20
"""Size of the largest allocation that comes from the heap, which keeps it. Larger ones are rare, and the holes that
they would leave in the heap would add to the peak memory."""

_SWITCH = "CONTRASTIVE_ZOO_MALLOPT"
"""The environment variable that turns this off: ``CONTRASTIVE_ZOO_MALLOPT=0``."""

_GLIBC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
"""Environment variables by which a user configures glibc's malloc. They take precedence."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

_threshold = 0


def keep_freed_memory(like: Tensor) -> None:
    """Raise glibc's trim threshold to twice the memory budget plus one block of similarities, if ``like`` is on a CPU.

    By default glibc returns large allocations to the system as soon as they are freed. The page faults of the next
    step then take a tenth of its time, or more. Nothing changes with another C library, with
    ``CONTRASTIVE_ZOO_MALLOPT=0``, or where glibc's own environment variables are set.

    Examples:
        >>> import torch
        >>> keep_freed_memory(torch.zeros(1))
    """
    global _threshold
    wanted = min(2 * budget() + BLOCK_BYTES, 2**31 - 1)
    if like.device.type != "cpu" or wanted <= _threshold:
        return
    _threshold = wanted
    if os.environ.get(_SWITCH) == "0" or any(name in os.environ for name in _GLIBC_VARIABLES):
        return
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _HEAP_BLOCK_BYTES)
        mallopt(_M_TRIM_THRESHOLD, wanted)
