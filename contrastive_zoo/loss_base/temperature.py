"""Learn a temperature."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.settings import is_number
from contrastive_zoo.loss_base.state import real
from contrastive_zoo.ranks.compiling import Function
from contrastive_zoo.ranks.row_checks import described


class LearnableTemperature(nn.Module):
    """Learn a temperature as the logarithm of its inverse, as CLIP does: t = exp(−θ).

    The scale 1/t = exp(θ) is at most ``max_scale``. Beyond it θ gets only gradients that reduce it, so it does not get
    stuck. θ itself is not clamped: FSDP and DeepSpeed keep copies of it.

    Args:
        initial: initial t > 0; 0.07 in CLIP.
        max_scale: largest 1/t; 100 in CLIP.

    Raises:
        ValueError: an initial temperature that is not positive and finite, or below 1 / max_scale.

    Examples:
        >>> t = LearnableTemperature(0.5)
        >>> t()
        tensor(0.5000, grad_fn=<ExpBackward0>)

    Source: Radford et al. 2021, §2.5, https://arxiv.org/abs/2103.00020
    """

    def __init__(self, initial: float = 0.07, *, max_scale: float = 100.0) -> None:
        super().__init__()
        are_numbers = is_number(initial, above=0) and is_number(max_scale, above=0, finite=False)
        on_meta = any(isinstance(x, Tensor) and x.is_meta for x in (initial, max_scale))
        if not are_numbers or on_meta or initial * max_scale < 1:
            raise ValueError(
                "LearnableTemperature: the initial temperature is positive and at least 1 / max_scale, got "
                f"{described(initial)} with max_scale={described(max_scale)}."
            )
        self.log_scale = nn.Parameter(torch.tensor([-math.log(initial)]))  # FSDP shards no parameter of shape []
        self.max_scale = max_scale

    def forward(self) -> Tensor:
        """Return t, a positive number, []."""
        return (-bounded(real(self.log_scale), high=math.log(self.max_scale))).exp()

    def extra_repr(self) -> str:
        """Show the current temperature, unless this process holds no value: a shard of it, or a meta tensor."""
        theta = self.log_scale
        has_value = type(theta) is nn.Parameter and theta.numel() == 1 and not theta.is_meta
        value = [f"{math.exp(-min(theta.item(), math.log(self.max_scale))):.4g}"] if has_value else []
        return ", ".join([*value, *([] if self.max_scale == 100 else [f"max_scale={self.max_scale:g}"])])


def bounded(x: Tensor, *, low: float = -math.inf, high: float) -> Tensor:
    """Return x within bounds; beyond them only gradients pass that move x back when an optimizer subtracts them."""
    if -low == high == math.inf or (x.is_cpu and x.ndim == 0 and low <= x.item() <= high):  # the usual case
        return x
    result: Tensor = _Bounded.apply(x, low, high)
    return result


class _Bounded(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float) -> Tensor:
        ctx.save_for_backward(x > high, None if low == -math.inf else x < low)
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        is_above, is_below = ctx.saved_tensors
        back = torch.where(is_above, g.clamp(min=0), g)
        return back if is_below is None else torch.where(is_below, g.clamp(max=0), back), None, None


class LogitScale(Loss):
    """A loss whose temperature is learnable by default; ``logit_scale`` is log(1/t), as in open_clip."""

    @property
    def logit_scale(self) -> nn.Parameter:
        """The parameter log(1/t), [1], of a :class:`LearnableTemperature`."""
        return self.get_parameter("temperature.log_scale")
