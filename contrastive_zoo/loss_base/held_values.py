"""What a loss holds besides parameters and modules, as text and as tensors, for ranks to compare."""

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import is_dataclass
from enum import Enum
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from contrastive_zoo.ranks.row_checks import in_one_line

NUMBERS = (float, bool, int, type(None))
"""Types of most settings, whose text is one line."""

OF_RANKS = frozenset({"rank", "local_rank", "global_rank", "is_main", "is_main_process", "device", "world"})
"""Names under which code keeps what tells ranks apart on purpose."""

_DEPTH = 5
"""How deep containers are looked into: they may hold themselves."""


def text_of(value: Any, depth: int = _DEPTH) -> str:
    """Return a value as one line: its class where it can be read no further; a tensor's dtype and shape.

    Examples:
        >>> text_of({"b": (1, 0.5), "a": torch.ones(2)})
        "{'a': float32 [2], 'b': (1, 0.5)}"
        >>> text_of(nn.Linear(1, 1))
        'Linear'
    """
    if isinstance(value, Tensor):
        return tensor_kind(value)
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, Enum, torch.dtype, np.generic)):
        return in_one_line(repr(value) if isinstance(value, (str, Enum)) else value)
    if isinstance(value, (type, FunctionType, MethodType)):
        return value.__qualname__
    parts = _parts(value) if depth else None
    if parts is None:
        return type(value).__name__
    texts = {name: text_of(x, depth - 1) for name, x in parts.items()}
    if isinstance(value, Sequence):
        return f"({', '.join(texts.values())})"
    return "{" + ", ".join(f"{name!r}: {text}" for name, text in texts.items()) + "}"


def tensors_of(value: Any, name: str, depth: int = _DEPTH) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors and arrays of numbers in a value, by path.

    Examples:
        >>> [name for name, _ in tensors_of({"a": [torch.ones(1), np.ones(2)]}, "weights")]
        ["weights['a'][0]", "weights['a'][1]"]
    """
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, np.ndarray):
        if value.dtype.kind in "biuf":
            yield name, torch.from_numpy(np.ascontiguousarray(value))
    elif depth and not isinstance(value, (*NUMBERS, str)):
        for key, x in (_parts(value) or {}).items():
            yield from tensors_of(x, f"{name}[{key!r}]", depth - 1)


def _parts(value: Any) -> Mapping[Any, Any] | None:
    """What a container holds; keys of a dict in one order on every rank, however it was filled."""
    if isinstance(value, Mapping):
        return {key: value[key] for key in sorted(value, key=repr)}
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if isinstance(value, AbstractSet):
        return dict(enumerate(sorted(value, key=repr)))
    if isinstance(value, SimpleNamespace) or is_dataclass(value):
        return {name: x for name, x in getattr(value, "__dict__", {}).items() if name not in OF_RANKS}
    return None


def tensor_kind(x: Tensor) -> str:
    """Return the dtype, the shape and whether a tensor is learnt, in words.

    Examples:
        >>> tensor_kind(nn.Parameter(torch.ones(2, 3)))
        'float32 [2, 3], learnt'
    """
    return _kind(x.dtype, tuple(x.shape), x.requires_grad)


@functools.lru_cache(maxsize=1024)
def _kind(dtype: torch.dtype, shape: tuple[int, ...], learnt: bool) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}{', learnt' if learnt else ''}"


def held_by_function(function: Any) -> dict[str, Any]:
    """Return what a function computes with besides its arguments: its closure, its defaults, what is bound to it.

    Of an object that is called, these are the attributes named like parameters of its constructor. What tells ranks apart
    by its name, such as ``rank``, is left out.

    Examples:
        >>> weight = 0.5
        >>> held_by_function(functools.partial(lambda z, power=2: weight * z ** power, power=3))
        {'power': 3}
        >>> def scaled(weight):
        ...     return lambda z: weight * z.sum()
        >>> held_by_function(scaled(0.5))
        {'weight': 0.5}
    """
    held: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        held = {**{str(i): x for i, x in enumerate(function.args)}, **function.keywords, **held}
        function = function.func
    if isinstance(function, FunctionType):
        code, defaults = function.__code__, function.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        held = {**dict(zip(names, defaults, strict=True)), **(function.__kwdefaults__ or {}), **held}
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        held = {name: _content(cell) for name, cell in cells} | held
    elif not isinstance(function, nn.Module) and hasattr(function, "__dict__") and not isinstance(function, type):
        attributes = vars(function)
        kind: Any = type(function)
        held |= {name: attributes[name] for name in constructed_with(kind) if name in attributes}
    return {name: x for name, x in held.items() if name not in OF_RANKS}


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the function that defines the variable still runs
        return None


@functools.cache
def constructed_with(kind: type) -> tuple[str, ...]:
    """Return the names of the parameters of a class's constructor and its bases'.

    Examples:
        >>> constructed_with(nn.Dropout)[1:]
        ('p', 'inplace', 'args', 'kwargs')
    """
    names: dict[str, None] = {}
    for base in kind.__mro__:
        constructor: Any = vars(base).get("__init__")
        if inspect.isfunction(constructor):
            names |= dict.fromkeys(inspect.signature(constructor).parameters)
    return tuple(names)
