"""A loss in words and numbers: its class tree with all settings, and its parameters and buffers, for ranks to compare."""

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]  # not in __all__

from contrastive_zoo.engine.precision import sum_dtype
from contrastive_zoo.ranks.devices import read_later
from contrastive_zoo.ranks.row_checks import in_one_line

_CHUNK = 2**20
"""Numbers that are projected at a time: a fixed direction as long as a million classes' weights is never held."""


class LossModules:
    """The modules of a loss by path, walked once a step: what ranks compare of them, and what a step changes in them.

    Args:
        loss: a module, or a function, which has none.

    Examples:
        >>> LossModules(nn.Dropout(0.5)).settings()
        {'the loss': 'Dropout', 'p': '0.5', 'inplace': 'False', 'training': 'True'}
        >>> LossModules(nn.Dropout(0.5)).runs_third_party_code
        True
        >>> [name for name, _ in LossModules(nn.Linear(1, 1)).shared_state()]
        ['weight', 'bias']
    """

    def __init__(self, loss: Any) -> None:
        self.loss = loss
        self.by_path: dict[str, nn.Module] = dict(loss.named_modules()) if isinstance(loss, nn.Module) else {}

    def settings(self, *, third_party: bool = True) -> dict[str, str]:
        """The class of every module by its path, and its settings: public attributes that are plain values.

        Settings of a third-party module are the attributes named like parameters of its constructor: other attributes
        may be results that a copy on one rank does not have.

        Args:
            third_party: whether settings of third-party modules are included.
        """
        if not self.by_path:
            return {"the loss": loss_name(self.loss)}
        lines: dict[str, str] = {}
        for path, module in self.by_path.items():
            kind: Any = type(module)
            lines[path or "the loss"] = kind.__name__
            prefix = f"{path}." if path else ""
            held: dict[str, Any] = vars(module)
            if not _extends_this_library(kind):
                names = [*(_constructed_with(kind) if third_party else ()), "training"]
                held = {name: held[name] for name in names if name in held}
            for name, value in held.items():
                if name[0] == "_":
                    continue
                if type(value) in _NUMBERS or (type(value) is str and value.isidentifier()):
                    lines[prefix + name] = str(value)
                elif _is_setting(value):
                    lines[prefix + name] = in_one_line(value)
        return lines

    @functools.cached_property
    def runs_third_party_code(self) -> bool:
        """Whether any module is defined outside of this library: it may draw random numbers or keep a state."""
        for module in self.by_path.values():
            function = vars(module).get("loss")  # of a wrapper or a memory; modules are in the table
            kinds: Any = (type(module), type(function))
            if is_third_party(kinds[0]) or (function is not None and is_third_party(kinds[1])):
                return True
        return False

    def shared_state(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and buffers that are equal on every rank, by name: neither sharded ones nor lazy ones."""
        for path, module in self.by_path.items():
            own = {} if getattr(module, "sharded", False) else {**module._parameters, **module._buffers}
            for name, x in own.items():
                is_sharded = hasattr(x, "device_mesh")  # a DTensor, of which each rank holds another part
                if x is not None and not is_sharded and not isinstance(x, UninitializedTensorMixin):
                    yield f"{path}.{name}" if path else name, x

    def buffer_versions(self) -> list[tuple[Tensor, int]]:
        """Every buffer and its version, which grows with each change in place."""
        result: list[tuple[Tensor, int]] = []
        for module in self.by_path.values():
            if module._buffers:
                result += [(x, x._version) for x in module._buffers.values() if x is not None]
        return result

    def buffers_changed(self, before: list[tuple[Tensor, int]]) -> bool:
        """Whether a buffer was changed or replaced since ``before``, which :meth:`buffer_versions` returned."""
        now = self.buffer_versions()
        if not now and not before:
            return False
        return len(now) != len(before) or any(
            x is not y or new != old for (x, new), (y, old) in zip(now, before, strict=True)
        )


@functools.cache
def is_third_party(kind: Any) -> bool:
    is_container = issubclass(kind, (nn.ModuleList, nn.ModuleDict))
    return not is_container and not kind.__module__.startswith("contrastive_zoo.")


@functools.cache
def _extends_this_library(kind: type) -> bool:
    return any(base.__module__.startswith("contrastive_zoo.") for base in kind.__mro__)


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
    def of(cls, modules: LossModules) -> "Callable[[], StateSums]":
        """Start to sum up the shared state; the result returns the sums.

        Examples:
            >>> StateSums.of(LossModules(nn.BatchNorm1d(1, affine=False)))().by_name
            {'running_mean': 0.0, 'running_var': 1.0, 'num_batches_tracked': 0.0}
        """
        state = dict(modules.shared_state())
        if not state:
            return lambda: cls(0.0, 0.0, {})
        device = next(iter(state.values())).device
        sums = [
            [vector_norm(x.detach().to(sum_dtype(x))).to(device), _projection(x).to(device)] for x in state.values()
        ]
        read = read_later(torch.stack([torch.stack(x) for x in sums]).T)

        def found() -> "StateSums":
            numbers = read()
            norms, projections = numbers[: len(state)], numbers[len(state) :]
            by_name = dict(zip(state, norms, strict=True))
            return cls(sum(x**2 for x in norms) ** 0.5, sum(projections), by_name)

        return found


def _projection(x: Tensor) -> Tensor:
    """On a direction that any rank can make again, a piece at a time."""
    flat, dtype = x.detach().flatten(), sum_dtype(x)
    total = torch.zeros((), dtype=dtype, device=x.device)
    for start, part in zip(range(0, len(flat), _CHUNK), flat.split(_CHUNK), strict=True):
        direction = torch.arange(start, start + len(part), dtype=dtype, device=x.device).add_(1).sin_()
        total += part.to(dtype) @ direction
    return total


def without_ddp(loss: Any) -> Any:
    """The loss inside of DDP, or the loss itself.

    Examples:
        >>> without_ddp(abs)
        <built-in function abs>
    """
    return loss.module if isinstance(loss, nn.parallel.DistributedDataParallel) else loss


def loss_name(loss: Any) -> str:
    """The name of a function, or of a module's class.

    Examples:
        >>> loss_name(abs), loss_name(nn.MSELoss())
        ('abs', 'MSELoss')
    """
    return type(loss).__name__ if isinstance(loss, nn.Module) else getattr(loss, "__name__", type(loss).__name__)


_NUMBERS = (float, bool, int, type(None))
"""Types of most settings, whose text is one line."""


def _is_setting(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_setting(x) for x in value)
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype))
