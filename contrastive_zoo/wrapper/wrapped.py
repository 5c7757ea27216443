"""Distributed wrappers inside of losses and miners: two of them would gather twice, and return a wrong value silently."""

import functools
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from torch import nn

_LIBRARY = "pytorch_metric_learning"
_LOSSES = {("contrastive_zoo", "DistributedLoss"), (_LIBRARY, "DistributedLossWrapper")}
_MINERS = {("contrastive_zoo", "DistributedMiner"), (_LIBRARY, "DistributedMinerWrapper")}
_ATTRIBUTES = {"loss": {(_LIBRARY, "DistributedLossWrapper")}, "miner": _MINERS}
"""Outermost wrappers that are taken off, by the name of the attribute that holds the wrapped object."""


def unwrapped_miner(caller: str, miner: Any, *, process_group: Any = None) -> Any:
    """Return the miner inside of a DistributedMiner or of pytorch-metric-learning's wrapper; any other miner unchanged."""
    own_group = getattr(miner, "process_group", None) if _kind(miner) in _MINERS else None
    if own_group is not None and own_group is not process_group:
        raise ValueError(
            f"{caller}: the DistributedMiner has a process group of its own, with other rows than this loss. Pass the bare "
            "miner, or give both the same process_group."
        )
    return unwrapped(caller, "miner", miner)


def unwrapped(caller: str, role: str, x: Any) -> Any:
    """Return a loss or a miner without its outermost wrapper, as ``role`` says."""
    if isinstance(x, type):
        raise ValueError(
            f"{caller}: a {role} is an instance, got the class {x.__name__}. Pass an instance, {x.__name__}(...)."
        )
    if _kind(x) in _ATTRIBUTES[role]:
        x = getattr(x, role)
    for place, result in _inside(x, role, set()):
        kind = _kind(result)
        if kind not in _LOSSES | _MINERS or (result is x and kind[0] == "contrastive_zoo"):  # the caller refuses it
            continue
        library = "" if kind[0] == "contrastive_zoo" else "pytorch-metric-learning's "
        raise ValueError(
            f"{caller}: {place} is {library}{kind[1]}, which gathers all ranks' rows. {caller} gathers them, too: each row "
            "would count once for every rank, and the value would be wrong. Pass the bare "
            f"{'loss' if kind in _LOSSES else 'miner'} there; {caller}, outermost, is enough."
        )
    return x


def _inside(x: Any, place: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield an object and its parts, each with the expression that reaches it."""
    if id(x) in seen:  # ids: parts may refer to each other, be unhashable, or compare elementwise
        return
    seen.add(id(x))
    yield place, x
    for name, part in _parts(x):
        yield from _inside(part, f"{place}{name}", seen)


def _parts(x: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an object, each with the suffix of its expression."""
    if isinstance(x, nn.Module):
        inside = {**vars(x).get("_modules", {}), **vars(x)}
        hidden = ("_parameters", "_buffers", "_modules")
        index = isinstance(x, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        for name, part in inside.items():
            if name not in hidden and isinstance(part, (nn.Module, list, tuple, Mapping, functools.partial)):
                yield f"[{name if name.isdigit() else repr(name)}]" if index else f".{name}", part
    elif isinstance(x, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in x.items())
    elif isinstance(x, (list, tuple)):
        yield from ((f"[{index}]", part) for index, part in enumerate(x))
    elif isinstance(x, functools.partial):
        yield ".func", x.func
        yield ".args", x.args
        yield ".keywords", x.keywords
    elif isinstance(x, types.MethodType):
        if _kind(x.__self__) in _LOSSES | _MINERS:
            yield ".__self__", x.__self__
    elif isinstance(x, types.FunctionType):
        # only wrappers that it closes over: any other object may be a trainer, whose parts are none of the loss's
        for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            with suppress(ValueError):  # the variable has no value yet
                if _kind(cell.cell_contents) in _LOSSES | _MINERS:
                    yield f"'s {name}", cell.cell_contents


def _kind(x: Any) -> tuple[str, str]:
    """Return package and name of the wrapper class that x is an instance of; empty strings if it is none."""
    for kind in type(x).__mro__:
        result = kind.__module__.partition(".")[0], kind.__name__
        if result in _LOSSES | _MINERS:
            return result
    return "", ""
