"""Run the smallest kernel that needs what all kernels need: it shows whether they run in this process."""

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

# mypy: ignore-errors


@triton.jit
def copied_tile(source, out):
    """Write ``out = source``, one tile."""
    out.store([0, 0], source.load([0, 0]))


def launch_smallest(device: torch.device) -> None:
    """Copy a tile by descriptors, and multiply 16 bits into float32, which torch 2.8 is the first to do on a GPU."""
    x = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    source, out = (TensorDescriptor.from_tensor(rows, [16, 16]) for rows in (x, torch.empty_like(x)))
    copied_tile[(1,)](source, out, num_warps=4)
    if x.is_cuda:
        torch.mm(x, x, out_dtype=torch.float32)
