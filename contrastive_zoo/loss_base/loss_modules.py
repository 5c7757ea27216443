"""A loss in words and numbers, for ranks to compare: its class tree with all that it holds, its parameters and buffers."""

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import is_dataclass
from enum import Enum
from operator import attrgetter
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]  # not in __all__

from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.ranks.row_checks import in_one_line

_NUMBERS = (float, bool, int, type(None))  # types of most settings, whose text is one line

_TEXTS = (*_NUMBERS, str)

_OF_RANKS = frozenset({"rank", "local_rank", "global_rank", "is_main", "is_main_process", "device", "world"})
"""Names under which code keeps what tells ranks apart on purpose."""

_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}


class LossModules:
    """The modules of a loss by path, walked once a step: what ranks compare of them, and what a step changes in them."""

    def __init__(self, loss: Any, *, third_party: bool = True, apart: AbstractSet[nn.Module] = frozenset()) -> None:
        self.loss, self.third_party = loss, third_party
        of_loss = loss.named_modules() if isinstance(loss, nn.Module) else ()
        self.by_path: dict[str, nn.Module] = {path: x for path, x in of_loss if x not in apart}

    def settings(self) -> dict[str, str]:
        """What ranks compare as text: the class of every module by its path, its attributes, and the kind of its tensors.

        Of a third-party module, these are the attributes named like parameters of its constructor: others may be results
        that a copy on one rank does not have; none without ``third_party``.
        """
        lines: dict[str, str] = {}
        if not self.by_path:
            lines["the loss"] = loss_name(self.loss)
        for path, module in self.by_path.items():
            own_code = "" if is_plain(module) else " with hooks or a forward of its own"
            lines[path or "the loss"] = f"{type(module).__name__}{own_code}"
        for name, value in self._held.items():
            is_short = type(value) in _NUMBERS or (type(value) is str and value.isidentifier())
            lines[name] = str(value) if is_short else _text_of(value)
        for path, module in self.by_path.items():
            kind_of: Any = type(module)
            is_split = _is_sharded(module)
            for tensors in (module._parameters, module._buffers):
                for name, x in tensors.items():
                    kind = "None" if x is None else str(x.dtype) if is_split or is_lazy(x) else _tensor_kind(x)
                    if x is not None and not is_third_party(kind_of) and x.is_cpu and _is_count(x):
                        kind += f" {x.item()}"  # a count
                    lines[f"{path}.{name}" if path else name] = kind
        return lines

    @functools.cached_property
    def _held(self) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for path, module in self.by_path.items():
            kind: Any = type(module)
            held, prefix = vars(module), f"{path}." if path else ""
            # torch's fully_shard and replicate keep theirs under two underscores, with a name that each process draws
            names = {x for x in held.keys() - _OF_MODULES - _OF_RANKS if not x.startswith("__")}
            if not _extends_this_library(kind):
                names &= {*(_constructed_with(kind) if self.third_party else ()), "training"}
            result |= {prefix + name: x for name, x in held.items() if name in names}
        return result

    @functools.cached_property
    def runs_third_party_code(self) -> bool:
        """Whether a module has hooks or is defined outside of this library: it may draw random numbers or keep a state."""
        for module in self.by_path.values():
            function = vars(module).get("loss")  # of a wrapper or a memory; modules are in the table
            kinds: Any = (type(module), type(function))
            if has_user_code(module) or is_third_party(kinds[0]) or (function is not None and is_third_party(kinds[1])):
                return True
        return False

    @functools.cached_property
    def has_own_formula(self) -> bool:
        """Whether a user has written a :class:`Loss` in it, of which ranks may compute parts apart."""
        return any(isinstance(x, Loss) and is_third_party(type(x)) for x in self.by_path.values())  # type: ignore[arg-type]  # mypy takes a class for its instance

    def lazy_problem(self) -> str | None:
        """Return which module has no parameters yet, in words, or None."""
        for module in self.by_path.values():
            if any(x is not None and is_lazy(x) for x in (*module._parameters.values(), *module._buffers.values())):
                return (
                    f"its {type(module).__name__} has no parameters yet. Call the bare loss once, with one seed on every "
                    "rank, before you make the optimizer and the DistributedLoss, or use a layer of known size."
                )
        return None

    def shared_state(self) -> dict[str, Tensor]:
        """Parameters and buffers that are equal on every rank, by name: neither sharded ones nor lazy ones."""
        result: dict[str, Tensor] = {}
        for path, module in self.by_path.items():
            of_module = {} if _is_sharded(module) else {**module._parameters, **module._buffers}
            for name, x in of_module.items():
                is_sharded = hasattr(x, "device_mesh")  # a DTensor, of which each rank holds another part
                if x is not None and not is_sharded and not is_lazy(x) and not _counts_nothing(module, x):
                    result[f"{path}.{name}" if path else name] = x
        return result

    def numbers(self) -> dict[str, Tensor]:
        """Everything numeric that must be equal on every rank and is no text: the shared state, tensors in attributes."""
        result = self.shared_state()
        for name, value in self._held.items():
            if type(value) not in _TEXTS:
                result |= _tensors_of(value, name)
        return result

    @functools.cached_property
    def has_buffers(self) -> bool:
        return any(map(attrgetter("_buffers"), self.by_path.values()))

    def buffer_versions(self) -> list[tuple[Tensor, int]]:
        """Every buffer and its version, which grows with each change in place."""
        modules = self.by_path.values()
        return [(x, x._version) for module in modules for x in module._buffers.values() if x is not None]

    def buffers_changed(self, before: list[tuple[Tensor, int]]) -> bool:
        """Whether a buffer was changed or replaced since ``before``, which :meth:`buffer_versions` returned."""
        now = self.buffer_versions()
        pairs = zip(now, before, strict=False)
        return len(now) != len(before) or any(x is not y or new != old for (x, new), (y, old) in pairs)


def has_user_code(module: nn.Module) -> bool:
    """Whether a call of this module runs hooks, or a ``forward`` that was set on it alone."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return "forward" in vars(module) or any(hooks)


def is_plain(module: nn.Module) -> bool:
    """Whether a call has no hooks, and of a :class:`Loss` is nothing but its ``inputs`` and ``compute``."""
    kind = type(module)
    of_library = kind.forward is Loss.forward and kind.__call__ is nn.Module.__call__
    return (of_library or not isinstance(module, Loss)) and not has_user_code(module)


@functools.cache
def is_third_party(kind: Any) -> bool:
    is_container = issubclass(kind, (nn.ModuleList, nn.ModuleDict))
    return not is_container and not kind.__module__.startswith("contrastive_zoo.")


@functools.cache
def _extends_this_library(kind: type) -> bool:
    return any(base.__module__.startswith("contrastive_zoo.") for base in kind.__mro__)


def _is_count(x: Tensor) -> bool:
    return x.numel() == 1 and not x.is_floating_point()


def _counts_nothing(module: nn.Module, x: Tensor) -> bool:
    """Whether this is the pointer of an empty memory, which nothing sets: lightly leaves whatever memory held."""
    return _is_count(x) and any(y is not None and not is_lazy(y) and not y.numel() for y in module._buffers.values())


def _is_sharded(module: nn.Module) -> bool:
    """Whether each rank holds another part of its parameters; nn.Module is slow to say that it has no such attribute."""
    return hasattr(type(module), "sharded") and bool(module.sharded)


def is_lazy(x: Tensor) -> bool:
    return isinstance(x, UninitializedTensorMixin)


def without_ddp(loss: Any) -> Any:
    return loss.module if isinstance(loss, nn.parallel.DistributedDataParallel) else loss


def loss_name(loss: Any) -> str:
    return type(loss).__name__ if isinstance(loss, nn.Module) else getattr(loss, "__name__", type(loss).__name__)


_DEPTH = 5  # how deep containers are looked into: they may hold themselves


def _text_of(value: Any, depth: int = _DEPTH) -> str:
    """Return a value as one line: its class where it can be read no further; a tensor's dtype and shape."""
    if isinstance(value, Tensor):
        return _tensor_kind(value)
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, Enum, torch.dtype, np.generic)):
        return in_one_line(repr(value) if isinstance(value, (str, Enum)) else value)
    if isinstance(value, (type, FunctionType, MethodType)):
        return value.__qualname__
    parts = _parts(value) if depth else None
    if parts is None:
        return type(value).__name__
    texts = {name: _text_of(x, depth - 1) for name, x in parts.items()}
    if isinstance(value, Sequence):
        return f"({', '.join(texts.values())})"
    return "{" + ", ".join(f"{name!r}: {text}" for name, text in texts.items()) + "}"


def _tensors_of(value: Any, name: str, depth: int = _DEPTH) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors and arrays of numbers in a value, by path."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, np.ndarray):
        if value.dtype.kind in "biuf":
            yield name, torch.from_numpy(np.ascontiguousarray(value))
    elif depth and not isinstance(value, (*_NUMBERS, str)):
        for key, x in (_parts(value) or {}).items():
            yield from _tensors_of(x, f"{name}[{key!r}]", depth - 1)


def _parts(value: Any) -> Mapping[Any, Any] | None:
    """What a container holds; keys of a dict in one order on every rank, however it was filled."""
    if isinstance(value, Mapping):
        return {key: value[key] for key in sorted(value, key=repr)}
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if isinstance(value, AbstractSet):
        return dict(enumerate(sorted(value, key=repr)))
    if isinstance(value, SimpleNamespace) or is_dataclass(value):
        return {name: x for name, x in getattr(value, "__dict__", {}).items() if name not in _OF_RANKS}
    return None


def _tensor_kind(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}{', learnt' if x.requires_grad else ''}"


@functools.cache
def _constructed_with(kind: type) -> tuple[str, ...]:
    """Return the names of the parameters of a class's constructor and its bases'."""
    names: dict[str, None] = {}
    for base in kind.__mro__:
        constructor: Any = vars(base).get("__init__")
        if inspect.isfunction(constructor):
            names |= dict.fromkeys(inspect.signature(constructor).parameters)
    return tuple(names)
