"""DeepSpeed's ZeRO optimizers, which hold parameters and gradients in flat pieces of all ranks."""

from typing import Any

import torch
from torch import Tensor, nn

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
