"""A loss in words and numbers: its class tree with all settings, and its parameters and buffers, for ranks to compare."""

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_zoo.later import read_later
from contrastive_zoo.session import in_one_line

_CHUNK = 2**20
"""Numbers that are projected at a time: a fixed direction as long as a million classes' weights is never held."""


def described(loss: Any, *, third_party: bool = True) -> dict[str, str]:
    """The class of every module in a loss by its path, and its settings: public attributes that are plain values.

    Of a module from elsewhere settings are the attributes named as parameters of its constructor: it may keep other things
    beside them that it has seen, which a copy on one rank has not.

    Args:
        loss: a module or a function.
        third_party: whether settings of modules from elsewhere are told.

    Examples:
        >>> described(nn.Dropout(0.5))
        {'the loss': 'Dropout', 'p': '0.5', 'inplace': 'False', 'training': 'True'}
    """
    if not isinstance(loss, nn.Module):
        return {"the loss": _name(loss)}
    lines: dict[str, str] = {}
    for path, module in loss.named_modules():
        lines[path or "the loss"] = _name(module)
        prefix = f"{path}." if path else ""
        held: dict[str, Any] = vars(module)
        if not any(kind.__module__.startswith("contrastive_zoo.") for kind in type(module).__mro__):
            constructed_with = _constructed_with(type(module)) if third_party else ()  # type: ignore[arg-type]
            names = [*constructed_with, "training"]
            held = {name: held[name] for name in names if name in held}
        for name, value in held.items():
            if not name.startswith("_") and _is_setting(value):
                lines[prefix + name] = in_one_line(value)
    return lines


@functools.cache
def _constructed_with(kind: type) -> tuple[str, ...]:
    """Names of the parameters of a class's constructor and its bases'."""
    names: dict[str, None] = {}
    for base in kind.__mro__:
        constructor: Any = vars(base).get("__init__")
        if inspect.isfunction(constructor):
            names |= dict.fromkeys(inspect.signature(constructor).parameters)
    return tuple(names)


@dataclass(frozen=True)
class StateSums:
    """The norm of a loss's parameters and buffers, their projection on a fixed direction, and the norm of each."""

    norm: float
    projection: float
    by_name: dict[str, float]

    @classmethod
    def of(cls, loss: Any) -> "Callable[[], StateSums]":
        """Start to sum up a loss's state, without what each rank holds for itself; the result returns the sums.

        Examples:
            >>> StateSums.of(nn.BatchNorm1d(1, affine=False))().by_name
            {'running_mean': 0.0, 'running_var': 1.0, 'num_batches_tracked': 0.0}
        """
        state = dict(shared_state(loss))
        if not state:
            return lambda: cls(0.0, 0.0, {})
        device = next(iter(state.values())).device
        sums = [[x.detach().double().norm().to(device), _projection(x).to(device)] for x in state.values()]
        read = read_later(torch.stack([torch.stack(x) for x in sums]).T)

        def found() -> "StateSums":
            numbers = read()
            norms, projections = numbers[: len(state)], numbers[len(state) :]
            by_name = dict(zip(state, norms, strict=True))
            return cls(sum(x**2 for x in norms) ** 0.5, sum(projections), by_name)

        return found


def _projection(x: Tensor) -> Tensor:
    """On a direction that any rank can make again, a piece at a time."""
    flat, total = x.detach().flatten(), torch.zeros((), dtype=torch.float64, device=x.device)
    for start, part in zip(range(0, len(flat), _CHUNK), flat.split(_CHUNK), strict=True):
        direction = torch.arange(start, start + len(part), dtype=torch.float64, device=x.device).add_(1).sin_()
        total += part.double() @ direction
    return total


def runs_foreign_code(loss: Any) -> bool:
    """Whether a loss of this library runs code from elsewhere, which may draw random numbers or keep a state.

    Examples:
        >>> runs_foreign_code(nn.Linear(1, 1))
        True
    """
    called = [x for module in loss.modules() for x in (module, getattr(module, "loss", None)) if x is not None]
    return any(not type(x).__module__.startswith("contrastive_zoo.") for x in called if not _holds_modules(x))


def _holds_modules(module: Any) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))


def shared_state(loss: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers of a loss that are the same on every rank, by name.

    Examples:
        >>> [name for name, _ in shared_state(nn.Linear(1, 1))]
        ['weight', 'bias']
    """
    for path, module in loss.named_modules() if isinstance(loss, nn.Module) else ():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, x in () if getattr(module, "sharded", False) else own:
            held_in_parts = hasattr(x, "device_mesh")  # a DTensor, of which each rank has another part
            if not held_in_parts and not isinstance(x, nn.UninitializedParameter | nn.UninitializedBuffer):
                yield f"{path}.{name}" if path else name, x


def _name(loss: Any) -> str:
    return getattr(loss, "__name__", type(loss).__name__)


def _is_setting(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_setting(x) for x in value)
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype))
