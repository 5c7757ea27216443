"""Faults of one rank, and the properties of a loss that decide which faults it can have."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from contrastive_zoo.testing.measurement import Case, set_float64_and_seed, split_parameters

Fault = Literal["option", "setting", "parameter", "argument"]
"""What differs on the last rank: the wrapper's ``grad_reduction``, a setting of the loss, the value of a parameter of the
loss, or a missing argument."""


@dataclass(frozen=True)
class Traits:
    """Properties of a loss that decide which invariants apply.

    Args:
        is_wrapper: whether the loss is a wrapper with an option ``grad_reduction``.
        setting: name of a float setting of the wrapped loss; None if it has none.
        parameter: name of a replicated parameter; None if it has none.
        sharded: whether it has sharded parameters.
    """

    is_wrapper: bool
    setting: str | None
    parameter: str | None
    sharded: bool


def traits(case: Case) -> Traits:
    """Construct the loss and return its properties; runs on a rank."""
    set_float64_and_seed()
    loss = case.make()
    if case.step:
        return Traits(False, None, None, False)
    module = loss if isinstance(loss, nn.Module) else nn.Module()
    replicated, sharded = split_parameters(module, dict(module.named_parameters()))
    setting = _float_setting(loss)
    return Traits(_is_wrapper(loss), setting and setting[1], next(iter(replicated), None), bool(sharded))


@contextmanager
def inject(fault: Fault | None, loss: Any) -> Iterator[None]:
    """Change the loss on this rank inside the context. ``"argument"`` and None change nothing."""
    if fault == "option":
        before, loss.grad_reduction = loss.grad_reduction, "sum" if loss.grad_reduction == "mean" else "mean"
        yield
        loss.grad_reduction = before
    elif fault == "setting":
        result = _float_setting(loss)
        assert result is not None, "the fault is injected only where Traits.setting is not None"
        module, name = result
        value = getattr(module, name)
        setattr(module, name, 0.9 * value)
        yield
        setattr(module, name, value)
    elif fault == "parameter":
        replicated, _ = split_parameters(loss, dict(loss.named_parameters()))
        parameter = next(iter(replicated.values()))
        value = parameter.detach().clone()
        # not a constant, which may cancel out
        parameter.data += torch.linspace(0.1, 0.2, parameter.numel()).view_as(parameter)
        yield
        parameter.data.copy_(value)
    else:
        yield


def _is_wrapper(loss: Any) -> bool:
    return isinstance(loss, nn.Module) and {"grad_reduction", "loss"} <= {*vars(loss), *loss._modules}


def _float_setting(loss: Any) -> tuple[nn.Module, str] | None:
    """Return the first float attribute of the wrapped loss: its module and its name."""
    for module in loss.loss.modules() if _is_wrapper(loss) and isinstance(loss.loss, nn.Module) else ():
        for name, x in vars(module).items():
            if isinstance(x, float) and x != 0 and math.isfinite(x) and not name.startswith("_"):
                return module, name
    return None
