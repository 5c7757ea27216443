"""What the kernels accept."""

import torch
from torch import Tensor

from contrastive_zoo.kernels.blocks import LARGEST_WIDTH, Tile, tiles

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def checked(name: str, a: Tensor, b: Tensor, *, same_length: bool = False) -> None:
    """Complain of rows that the kernels cannot compare.

    Raises:
        ValueError: says what came and what was expected.
    """
    got = f"got {_kind(a)} and {_kind(b)}"
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or not len(a) or not len(b):
        raise ValueError(f"{name}: a and b are [n, d] and [m, d] of at least one row, {got}.")
    if same_length and len(a) != len(b):
        raise ValueError(f"{name}: a and b have as many rows, {got}.")
    if a.dtype not in DTYPES or a.dtype != b.dtype or a.device != b.device:
        raise ValueError(f"{name}: a and b are both float32, bfloat16 or float16, on one device, {got}.")
    if not 1 <= a.shape[1] <= LARGEST_WIDTH:
        raise ValueError(f"{name}: rows have 1 to {LARGEST_WIDTH} numbers, {got}.")


def _kind(x: Tensor) -> str:
    return f"{x.dtype} {list(x.shape)} on {x.device}"


def as_scalar(x: float | Tensor, like: Tensor) -> Tensor:
    """A number as a float32 tensor on the device, without waiting for it."""
    if isinstance(x, Tensor):
        return x.reshape(()).to(like.device, torch.float32)
    return torch.full((), x, dtype=torch.float32, device=like.device)


def precision_of(x: Tensor) -> str:
    """How float32 products round: as ``torch.get_float32_matmul_precision()`` says."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" and x.dtype == torch.float32 else "tf32"


def tiles_for(x: Tensor, precision: str) -> tuple[Tile, Tile]:
    """Tiles without and with masks on the device of x."""
    capability = torch.cuda.get_device_capability(x.device) if x.is_cuda else (8, 0)
    return tiles(x.dtype, precision, 10 * capability[0] + capability[1])
