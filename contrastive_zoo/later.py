"""Asynchronous copies from an accelerator to the host, which never waits for the device."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class ValueCheck(NamedTuple):
    """A check of values on a device, of which the host reads a few integers or bools.

    Examples:
        >>> check = ValueCheck(torch.tensor([3, 9]), lambda numbers: f"got {numbers[1]}" if numbers[1] > 5 else None)
        >>> check.problem(check.numbers.tolist())
        'got 9'
    """

    numbers: Tensor
    problem: Callable[[Sequence[float]], str | None]
    """Returns what is wrong, given the numbers, in words; None if nothing is."""


def read_later(x: Tensor) -> Callable[[], list[float]]:
    """Start to copy a small tensor to the host, and return a function that returns ``x.flatten().tolist()``.

    Call the function a step later, when the copy is complete. ``x.tolist()`` would wait for all kernels launched before it.

    Examples:
        >>> read_later(torch.tensor([1.0, 2.0]))()
        [1.0, 2.0]
    """
    flat = x.detach().flatten()
    if flat.device.type == "cpu":
        return flat.tolist
    copied = torch.Event(flat.device.type)
    copy = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True).copy_(flat, non_blocking=True)
    copied.record()

    def read() -> list[float]:
        copied.synchronize()
        numbers: list[float] = copy.tolist()
        return numbers

    return read
