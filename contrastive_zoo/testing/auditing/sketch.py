"""Sketches of tensors: 64 numbers each, linear in the tensor, whose norm is near its norm."""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from contrastive_zoo.testing.auditing.zero import whole_parameter
from contrastive_zoo.testing.evidence import SKETCH

SIZE, ROWS = SKETCH, 4096
"""Numbers in a sketch, and signs for each of them; a norm of a sketch has a standard deviation of √(1 / 128) = 9 %."""


@functools.cache
def _signs(device: torch.device, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return (torch.randint(0, 2, (count,), generator=generator) * 2 - 1).double().to(device)


def sketch(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the sketch of a tensor, or of its elements times the magnitudes of ``weight``, [64] in float64.

    A tensor of up to 64 elements is its own sketch, padded with zeros. Of a larger one, each element is added with a random
    sign to one of the numbers (a count sketch, Charikar et al. 2002, https://doi.org/10.1007/3-540-45465-9_59).
    """
    x = x.detach().reshape(-1)
    block = SIZE if len(x) <= SIZE else SIZE * ROWS
    result = torch.zeros(SIZE, dtype=torch.float64, device=x.device)
    signs = torch.ones(SIZE, device=x.device) if block == SIZE else _signs(x.device, block)
    of_blocks = _signs(torch.device("cpu"), ROWS).tolist()
    for index, start in enumerate(range(0, len(x), block)):
        part = x[start : start + block].double()
        if weight is not None:
            part = part * weight.detach().reshape(-1)[start : start + block].double().abs()
        part = torch.nn.functional.pad(part * signs[: len(part)], (0, -len(part) % SIZE))
        result += of_blocks[index % ROWS] * part.view(-1, SIZE).sum(0)
    return result.cpu()


def whole(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return all of a tensor of which every rank holds a part: a DTensor, a piece of FSDP1 in its group, or one of ZeRO.

    Every rank of the group must call it.
    """
    if hasattr(x, "ds_id"):
        return whole_parameter(x)
    x = x.detach()
    if hasattr(x, "full_tensor"):
        gathered: Any = x.full_tensor()
        return gathered.wait() if hasattr(gathered, "wait") else gathered
    if group is None or group.size() == 1:
        return x
    size = torch.tensor(x.numel(), device=x.device)
    sizes = [torch.zeros_like(size) for _ in range(group.size())]
    dist.all_gather(sizes, size, group=group)
    longest = int(max(sizes))
    pieces = [x.new_zeros(longest) for _ in sizes]
    dist.all_gather(pieces, torch.nn.functional.pad(x.reshape(-1), (0, longest - x.numel())), group=group)
    return torch.cat([piece[: int(n)] for piece, n in zip(pieces, sizes, strict=True)])
