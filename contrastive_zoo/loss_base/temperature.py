"""A temperature that is learnt, and how formulas take one."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from contrastive_zoo.collectives import replicated
from contrastive_zoo.engine.precision import wide
from contrastive_zoo.loss_base.checks import is_number, shared_problem
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.loss_base.numbers import real, widen_numbers
from contrastive_zoo.world import World


class LearnableTemperature(nn.Module):
    """A temperature that is learnt as the logarithm of its inverse, as CLIP does: t = exp(−θ).

    The scale 1/t = exp(θ) is kept at or below ``max_scale`` by clamping θ itself before each use, not its gradient, so
    that θ never gets stuck beyond the bound.

    Args:
        initial: t at the start, > 0; CLIP's is 0.07.
        max_scale: largest 1/t; CLIP's is 100.

    Raises:
        ValueError: an initial temperature that is not positive and finite, or below 1 / max_scale.

    Example:
        >>> t = LearnableTemperature(0.5)
        >>> t()
        tensor(0.5000, grad_fn=<ExpBackward0>)

    Source: Radford et al. 2021, §2.5, https://arxiv.org/abs/2103.00020
    """

    def __init__(self, initial: float = 0.07, *, max_scale: float = 100.0) -> None:
        super().__init__()
        if not (
            is_number(initial, above=0) and is_number(max_scale, above=0, finite=False) and initial * max_scale >= 1
        ):
            raise ValueError(
                f"LearnableTemperature: the initial temperature is positive and at least 1 / max_scale, got {initial} "
                f"with max_scale={max_scale}."
            )
        self.log_scale = nn.Parameter(torch.tensor([-math.log(initial)]))  # FSDP shards no parameter of shape []
        self.max_scale = max_scale

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        widen_numbers(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self) -> Tensor:
        """t, a positive number, []."""
        log_scale = real(self.log_scale)
        if log_scale.item() > math.log(self.max_scale):
            # .data: two forward passes before a backward one are fine, the values that autograd keeps are exp's results
            log_scale.data.fill_(math.log(self.max_scale))
        t = (-log_scale).exp()
        t.log_scale = log_scale  # which few pairs differentiate by at once
        return t

    def extra_repr(self) -> str:
        """The temperature at this moment, where this process holds it: a shard of it, or none yet, has no value."""
        theta = self.log_scale
        here = type(theta) is nn.Parameter and theta.numel() == 1 and not theta.is_meta
        value = [f"{math.exp(-min(theta.item(), math.log(self.max_scale))):.4g}"] if here else []
        return ", ".join([*value, *([] if self.max_scale == 100 else [f"max_scale={self.max_scale:g}"])])


class LearntScale(Loss):
    """A loss whose temperature is learnt from the given one on; ``logit_scale`` is log(1/t), as in open_clip's models.

    Example:
        >>> from contrastive_zoo.losses.clip import Clip
        >>> Clip(temperature=0.5).logit_scale
        Parameter containing:
        tensor([0.6931], requires_grad=True)
    """

    max_scale: ClassVar[float] = 100.0

    def __init__(self, **settings: Any) -> None:
        temperature = settings.pop("temperature", self._defaults["temperature"])
        if not isinstance(temperature, nn.Module):
            if problem := shared_problem(temperature=temperature):
                raise ValueError(f"{type(self).__name__}: {problem}")
            temperature = LearnableTemperature(temperature, max_scale=self.max_scale)
        super().__init__(temperature=temperature, **settings)

    @property
    def logit_scale(self) -> nn.Parameter:
        """log(1/t), [1]."""
        return self.get_parameter("temperature.log_scale")


def logit_scale(temperature: float | Tensor, world: World) -> float | Tensor:
    """1 / temperature; a learnable one is used by each rank for its own rows and gets the gradient of all.

    Example:
        >>> from contrastive_zoo.world import ALONE
        >>> logit_scale(0.5, ALONE)
        2.0
    """
    temperature = real(temperature)
    if isinstance(temperature, Tensor):
        return 1 / wide(replicated(temperature, process_group=world))
    return 1 / temperature
