"""Where tensors are: the host can read values on a CPU at once, those on an accelerator only after all work queued there."""

from torch import Tensor


def on_cpu(x: Tensor) -> bool:
    """Return whether the host can read the values of x without waiting for another device.

    Examples:
        >>> import torch
        >>> on_cpu(torch.ones(2)), on_cpu(torch.ones(2, device="meta"))
        (True, False)
    """
    return x.is_cpu
