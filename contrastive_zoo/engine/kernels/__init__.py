"""Compute contrastive losses with Triton, on GPUs of compute capability 8.0 or later, with torch 2.8 or later."""

import os
from functools import cache

import torch


def device_problem(device: torch.device) -> str | None:
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0):
        return None
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return f"runs on NVIDIA GPUs of compute capability 8.0 or later, got embeddings on {device.type}"


@cache
def installation_problem(device: torch.device) -> str | None:
    """Return why kernels cannot be imported, compiled or launched on a suitable device; tried once per process."""
    try:
        from contrastive_zoo.engine.kernels.blocks import launch_smallest  # imported here: Triton is optional

        launch_smallest(device)
    except Exception as error:  # a Triton of another version, no C compiler, no memory: all would fail in a step, too
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return f"cannot run here ({reason}). It needs torch 2.8 or later and pip install 'contrastive_zoo[triton]'"
    return None
