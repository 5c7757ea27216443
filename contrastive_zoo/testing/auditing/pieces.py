"""Tensors of which every rank holds a piece, by FSDP, DTensors or DeepSpeed's ZeRO: all of them, and their sketches."""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

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


# --- ZeRO -------------------------------------------------------------------------------------------------------------

PARAMETERS = {"DeepSpeedZeroOptimizer": "bit16_groups", "DeepSpeedZeroOptimizer_Stage3": "fp16_groups"}
"""By the class of an optimizer, of stages 1 and 2 and of stage 3, the attribute with its groups of parameters."""


def is_engine(module: nn.Module) -> bool:
    """Return whether a module is DeepSpeed's engine, which need not be installed."""
    return any(cls.__name__ == "DeepSpeedEngine" for cls in type(module).__mro__)


def unreadable(optimizer: Any) -> str:
    """Return why the gradients of an engine's optimizer cannot be compared; empty if they can."""
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return ""
    if type(optimizer).__name__ not in PARAMETERS:
        return f"DeepSpeed's {type(optimizer).__name__} holds gradients in buffers that the audit does not read"
    return "" if optimizer.loss_scale == 1 else "DeepSpeed scales the loss, and the gradients in its buffers with it"


def held(optimizer: Any) -> list[Tensor]:
    """Return the parameters of an optimizer; of one of ZeRO, those of the model, and not its flat pieces."""
    attribute = PARAMETERS.get(type(optimizer).__name__)
    groups = getattr(optimizer, attribute) if attribute else [group["params"] for group in optimizer.param_groups]
    return [x for group in groups for x in group]


def is_in_pieces(x: Tensor) -> bool:
    """Return whether a ZeRO optimizer holds the gradient of a parameter."""
    return hasattr(x, "_hp_mapping") or hasattr(x, "_z3_optimizer")


def whole_gradient(x: Tensor) -> Tensor:
    """Return all of a gradient that is in pieces. Every rank must call it, before the optimizer's step."""
    from deepspeed.utils import safe_get_full_grad

    gradient = safe_get_full_grad(x)
    return x.new_zeros(0) if gradient is None else gradient.detach().clone()


def whole_parameter(x: Any) -> Tensor:
    """Return all of a parameter of stage 3. Every rank must call it."""
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters([x]):
        result: Tensor = x.detach().clone()
    return result


def assign(x: Any, value: Tensor) -> None:
    """Give a parameter of one process a value, and the optimizer's copy of it, too."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_set_full_fp32_param

    with GatheredParameters([x], modifier_rank=0, enabled=hasattr(x, "ds_id")):
        x.copy_(value.view_as(x))
    safe_set_full_fp32_param(x, value.float())
