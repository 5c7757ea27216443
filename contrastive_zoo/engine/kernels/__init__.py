"""Compute contrastive losses with Triton, on NVIDIA GPUs of compute capability 8.0 and later.

They need ``pip install contrastive_zoo[triton]`` and torch 2.8 or later; call :func:`available` first. ``softmax`` and
``sigmoid`` are means on one process. On several ranks, and for other reductions, kernels compute the blocks of the engines.
"""

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def available() -> bool:
    """Return whether kernels can run: Triton is installed, and there is a suitable GPU or Triton's interpreter is on."""
    if find_spec("triton") is None:
        return False
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True
    import torch  # imported here, so that the package imports without torch

    return torch.cuda.is_available() and device_problem(torch.device("cuda")) is None


def device_problem(device: "torch.device") -> str | None:
    """Return why kernels cannot run on a device, or None."""
    import torch  # imported here, so that the package imports without torch

    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0):
        return None
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return f"runs on NVIDIA GPUs of compute capability 8.0 or later, got embeddings on {device.type}"
