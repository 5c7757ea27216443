"""The types of a loss function's arguments, checked before anything is computed from them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, Literal, NamedTuple, ParamSpec

import numpy as np
from torch import Tensor, nn

from contrastive_zoo.devices import beside_rows
from contrastive_zoo.loss_base.checks import holds_numbers
from contrastive_zoo.loss_base.graph_operator import in_graph
from contrastive_zoo.loss_base.numbers import real
from contrastive_zoo.row_checks import described, tensor_problem
from contrastive_zoo.session import refuse
from contrastive_zoo.world import ALONE

P = ParamSpec("P")

Kind = Literal["tensor", "flag", "number", "word", "other"]


class _Expected(NamedTuple):
    kind: Kind
    optional: bool


def checked(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """``function`` behind a check of its arguments' types; an operator of a graph that ``torch.compile`` makes.

    Tensors are dense, hold values and have a dtype that torch computes with. A setting whose default is True or False is a
    bool, one whose default is a number is a number, and one whose default is a word is a word. The rest is the function's.

    Examples:
        >>> @checked
        ... def mean(rows: Tensor, *, normalize: bool = True):
        ...     return rows.mean()
        >>> import torch
        >>> mean(torch.ones(2), normalize="no")
        Traceback (most recent call last):
        ...
        ValueError: mean: normalize is True or False, got 'no'.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        expected = _expected(run)
        if (problem := _problem(expected, args, kwargs)) is not None:
            world: Any = kwargs.get("world", ALONE)
            refuse(getattr(function, "loss_name", function.__name__), problem, world=world)
        rows, named = beside_rows(args, kwargs)
        for name, x in named.items():
            # numbers of NumPy and of tensors [1] compute in their own precision, and Python's in that of the other tensors
            if isinstance(x, np.generic):
                named[name] = x.item()
            elif isinstance(x, Tensor) and expected[name].kind == "number":
                named[name] = real(x)
        plain: Any = named
        return function(*rows, **plain)

    decorated = in_graph(run)
    _unchecked[decorated] = function
    return decorated


def unchecked(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a :func:`checked` function without its check, for arguments that have been checked; any other unchanged.

    Examples:
        >>> import contrastive_zoo as cz
        >>> unchecked(cz.nt_xent) is cz.nt_xent, unchecked(max) is max
        (False, True)
    """
    return _unchecked.get(function, function)


_unchecked: dict[Callable[..., Tensor], Callable[..., Tensor]] = {}
"""By the function that :func:`checked` has returned, the one that it was given."""


def settings_problem(function: Callable[..., Any], settings: Mapping[str, Any]) -> str | None:
    """Return which of the settings of a :func:`checked` function is of a wrong type, in words; None if none is."""
    expected = _expected(function)
    # tensors among the settings, such as class weights, are made by the constructor
    plain = {name: x for name, x in settings.items() if name in expected and expected[name].kind != "tensor"}
    return next(filter(None, (_argument_problem(name, x, expected[name]) for name, x in plain.items())), None)


@functools.cache
def _expected(function: Callable[..., Any]) -> dict[str, _Expected]:
    """What each argument is, by name; a variable number of positional arguments has the key ``*``."""
    found = {}
    for x in inspect.signature(function).parameters.values():
        if x.name != "world" and x.kind is not x.VAR_KEYWORD:
            found["*" if x.kind is x.VAR_POSITIONAL else x.name] = _Expected(_kind(x), x.default is None)
    return found


def _kind(parameter: inspect.Parameter) -> Kind:
    default = parameter.default
    if isinstance(default, bool):
        return "flag"
    if isinstance(default, (int, float)):
        return "number"
    if isinstance(default, str):
        return "word"
    words = str(parameter.annotation)
    if "Tensor" in words or "jaxtyping" in words:
        return "tensor"
    return "number" if default is None and "float" in words else "other"


def _problem(expected: Mapping[str, _Expected], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    views = expected.get("*")
    names = expected if views is None else map("view {}".format, count())
    for name, x in zip(names, args, strict=False):
        if (problem := _argument_problem(name, x, views or expected[name])) is not None:
            return problem
    for name, x in kwargs.items():
        if name in expected and (problem := _argument_problem(name, x, expected[name])) is not None:
            return problem
    return None


def _argument_problem(name: str, x: Any, expected: _Expected) -> str | None:
    kind = expected.kind
    if x is None and expected.optional:
        return None
    if kind == "tensor":
        return tensor_problem(name, x)
    if kind == "flag" and not isinstance(x, (bool, np.bool_)):
        return f"{name} is True or False, got {described(x)}."
    if kind == "word" and not isinstance(x, str):
        return f"{name} is a word, got {described(x)}."
    if kind == "number" and not _is_number(x):
        dense = tensor_problem(name, x) if isinstance(x, Tensor) else None
        return dense or f"{name} is a number, got {described(x)}."
    return None


def _is_number(x: Any) -> bool:
    """Whether x is a real number, or a tensor that holds one; a parameter on the meta device will."""
    if isinstance(x, Tensor):
        if x.is_meta and isinstance(x, nn.Parameter):
            return x.numel() == 1
        return x.numel() == 1 and holds_numbers(x)
    return isinstance(x, (int, float, np.integer, np.floating)) and not isinstance(x, bool)
