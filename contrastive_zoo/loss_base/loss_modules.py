"""A loss in words and numbers: its class tree with all settings, and its parameters and buffers, for ranks to compare."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]  # not in __all__

from contrastive_zoo.engine.precision import has_float64, sum_dtype
from contrastive_zoo.loss_base.held_values import (
    NUMBERS,
    OF_RANKS,
    constructed_with,
    held_by_function,
    tensor_kind,
    tensors_of,
    text_of,
)
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.ranks.devices import read_later

_TEXTS = (*NUMBERS, str)
_OF_MODULES = frozenset({*vars(nn.Module()), "_is_wrapped"}) - {"training"}

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
        """What ranks compare as text: the class of every module by its path, its attributes, and the kind of its tensors.

        Of a third-party module, these are the attributes named like parameters of its constructor: others may be results
        that a copy on one rank does not have. Of a function, it is what its closure holds.

        Args:
            third_party: whether settings of third-party modules and functions are included.
        """
        lines: dict[str, str] = {}
        if not self.by_path:
            lines["the loss"] = loss_name(self.loss)
        for path, module in self.by_path.items():
            is_plain = not isinstance(module, Loss) or module.is_plain
            lines[path or "the loss"] = type(module).__name__ + (
                "" if is_plain else " with hooks or a forward of its own"
            )
        for name, value in self._held(third_party=third_party):
            if type(value) in NUMBERS or (type(value) is str and value.isidentifier()):
                lines[name] = str(value)
            else:
                lines[name] = text_of(value)
        for path, module in self.by_path.items():
            is_split = getattr(module, "sharded", False)
            for tensors in (module._parameters, module._buffers):
                for name, x in tensors.items():
                    kind = "None" if x is None else str(x.dtype) if is_split or is_lazy(x) else tensor_kind(x)
                    if x is not None and x.is_cpu and x.numel() == 1 and not x.is_floating_point():
                        kind += f" {x.item()}"  # a count
                    lines[f"{path}.{name}" if path else name] = kind
        return lines

    def _held(self, *, third_party: bool) -> Iterator[tuple[str, Any]]:
        """Attributes of the modules, or what a function holds, by name."""
        if not self.by_path and third_party:
            for name, value in held_by_function(self.loss).items():
                yield f"the loss's {name}", value
        for path, module in self.by_path.items():
            kind: Any = type(module)
            held: dict[str, Any] = vars(module)
            if _extends_this_library(kind):
                names = [name for name in held if name not in _OF_MODULES and name not in OF_RANKS]
            else:
                names = [x for x in (*(constructed_with(kind) if third_party else ()), "training") if x in held]
            for name in names:
                yield f"{path}.{name}" if path else name, held[name]

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
                if x is not None and not is_sharded and not is_lazy(x):
                    yield f"{path}.{name}" if path else name, x

    def numbers(self, *, third_party: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Everything numeric that must be equal on every rank and is no text: the shared state, tensors in attributes."""
        yield from self.shared_state()
        for name, value in self._held(third_party=third_party):
            if type(value) not in _TEXTS:
                yield from tensors_of(value, name)

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


@dataclass(frozen=True)
class StateSums:
    """Any number of tensors as one number or two, for ranks to compare.

    Args:
        level: Σ log(0.001 + size) over the tensors, in the order of their names, with weights between 1 and 2. The size of a
            tensor x is 1.5 · |x| + x·v for a fixed unit vector v, so that a sign counts, too; of a large tensor, x·v is that
            of some of its numbers. A tensor that grows by a share changes the level by about that share.
        projection: Σ x·w with a fixed vector w for all numbers, as a share of the sizes, at calls that look closely.
    """

    level: float = 0.0
    projection: float | None = None

    @classmethod
    def of(cls, numbers: Mapping[str, Tensor], *, closely: bool) -> "Callable[[], StateSums]":
        """Start to sum up; the result returns the sums.

        Examples:
            >>> StateSums.of({"scale": torch.tensor([0.0])}, closely=False)()
            StateSums(level=-6.907755278982137, projection=None)
        """
        tensors = [x.detach() for _, x in sorted(numbers.items(), key=itemgetter(0)) if x.numel()]
        if all(x.is_cpu for x in tensors) and not closely:
            sizes = [_size_of_one(x.item()) if x.numel() == 1 else _size(x).item() for x in tensors]
            return lambda: cls(_level(sizes))
        device = next((x.device for x in tensors if not x.is_cpu), torch.device("cpu"))
        dtype = torch.float64 if has_float64(device) else torch.float32
        sums = [f(x).to(device, dtype) for f in (_size, _projection)[: 1 + closely] for x in tensors]
        read = read_later(torch.stack(sums)) if sums else list

        def finished() -> "StateSums":
            numbers = read()
            sizes, projections = numbers[: len(tensors)], numbers[len(tensors) :]
            return cls(_level(sizes), sum(projections) / math.hypot(_LEAST, *sizes) if closely else None)

        return finished


_LEAST = 1e-3
"""Differences of sizes below it count as they are, not as a share."""

_SAMPLE = 2**14
"""Numbers of a tensor whose signs and order count at every call."""


def _level(sizes: Sequence[float]) -> float:
    return sum((1 + index / len(sizes)) * math.log(_LEAST + size) for index, size in enumerate(sizes))


def _size_of_one(x: float) -> float:
    return 1.5 * abs(x) + x


def _size(x: Tensor) -> Tensor:
    x = x if x.dtype in (torch.float32, torch.float64) else x.float()
    sample = x.flatten()[:: x.numel() // _SAMPLE + 1]
    return (
        1.5 * vector_norm(x) + (sample * _unit_vector(len(sample), x.dtype, x.device)).sum()
    )  # `@` rounds in autocast


@functools.lru_cache(maxsize=64)
def _unit_vector(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    vector = torch.arange(1, count + 1, device=device, dtype=dtype).sin_()
    return vector / vector_norm(vector)


def _projection(x: Tensor) -> Tensor:
    """On a direction that any rank can make again, a piece at a time."""
    flat, dtype = x.flatten(), sum_dtype(x)
    total = torch.zeros((), dtype=dtype, device=x.device)
    for start, part in zip(range(0, len(flat), _CHUNK), flat.split(_CHUNK), strict=True):
        direction = torch.arange(start, start + len(part), dtype=dtype, device=x.device).add_(1).sin_()
        total += (direction * part).sum()
    return total


def is_lazy(x: Tensor) -> bool:
    return isinstance(x, UninitializedTensorMixin)


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
