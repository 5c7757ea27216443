"""Everything that one rank can change before a step, or all ranks in code of the user's: each is undone afterwards."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import contrastive_zoo as cz
from tests.random_steps.user_code import GENERATORS, HOLDERS, HidesInCompute, HidesInRows

Put = Callable[[Any], Any]
Rows = Callable[[list[Tensor]], list[Tensor]]


class Change(NamedTuple):
    what: str
    made: Callable[[], AbstractContextManager[object]] = nullcontext
    of_rows: Rows = lambda rows: rows
    hidden: bool = False  # ranks cannot read it: they may refuse one or two steps later
    right: bool = True  # whether steps are right if all ranks make it; otherwise they may refuse


def changes_of(wrapper: cz.DistributedLoss) -> list[list[Change]]:
    """Return all changes of one rank, in groups."""
    loss = wrapper.loss
    groups = [_of_call(loss), _of_surroundings(), _of_wrapper(wrapper), of_user_code(loss)]
    if isinstance(loss, nn.Module):
        groups += [_of_module(path or "the loss", module) for path, module in loss.named_modules()]
    else:
        groups.append(_of_function(loss))
    return [*filter(None, map(list, groups))]


def of_user_code(loss: Any) -> Iterator[Change]:
    """Yield what ranks cannot read: hidden numbers, private generators, and a parameter that is not shared."""
    if not isinstance(loss, HidesInRows | HidesInCompute):
        return
    for name, make in HOLDERS.items():
        put = functools.partial(loss.hidden.__setitem__, name)
        yield Change(f"a number in {name}", _put(put, make(1.1), loss.hidden[name]), hidden=True)
    for name, make in GENERATORS.items():
        if name == ("fork_rng" if isinstance(loss, HidesInCompute) else "torch.rand"):
            continue  # numbers of a shape alone, which differ between a batch and its parts only; a stream of rows
        put = functools.partial(setattr, loss, "noise")
        yield Change(f"noise of {name}", _put(put, make(), loss.noise), hidden=True, right=False)
    if isinstance(loss, HidesInCompute):
        put = functools.partial(setattr, loss, "shares")
        yield Change("an unshared parameter", _put(put, "no", loss.shares), hidden=True, right=False)


def _of_call(loss: Any) -> Iterator[Change]:
    floats: dict[str, Callable[[Tensor], Tensor]] = {
        "float32 rows": lambda x: x.float(),
        "wider rows": lambda x: torch.cat([x, x[..., :1]], -1),
        "rows without gradient": lambda x: x.detach(),
        "NaN rows": lambda x: x * torch.nan,
        "rows of one more dimension": lambda x: x[:, None],
        "an expanded view": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    }
    if getattr(loss, "takes_any_width", False):
        del floats["wider rows"]
    for what, change in floats.items():
        yield Change(what, of_rows=functools.partial(_each, change, floats=True))
    yield Change("short labels", of_rows=functools.partial(_each, lambda x: x.int(), floats=False))
    yield Change("labels as floats", of_rows=functools.partial(_each, lambda x: x.double(), floats=False))
    yield Change("an argument less", of_rows=lambda rows: rows[:-1])


def _each(change: Callable[[Tensor], Tensor], rows: list[Tensor], *, floats: bool) -> list[Tensor]:
    return [change(x) if x.is_floating_point() == floats else x for x in rows]


def _of_surroundings() -> Iterator[Change]:
    yield Change("autocast", lambda: torch.autocast("cpu", torch.bfloat16))
    yield Change("no gradients", torch.no_grad)
    yield Change("inference mode", torch.inference_mode)
    yield Change("plain formulas", cz.engine.plain_formulas)
    yield Change("a default dtype", _put(torch.set_default_dtype, torch.float64, torch.float32))
    yield Change("random states", _other_random_states)


@contextmanager
def _other_random_states() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        yield


def _of_wrapper(wrapper: cz.DistributedLoss) -> Iterator[Change]:
    other = {"grad_reduction": "sum" if wrapper.grad_reduction == "mean" else "mean", "ring": not wrapper.ring}
    for option, value in {**other, "check_finite": False, "check_equal": False, "check_distinct": False}.items():
        yield Change(f"{option}={value}", _attribute(wrapper, option, value))
    yield Change("evaluation", _put(wrapper.train, False, True))


def _of_module(path: str, module: nn.Module) -> Iterator[Change]:
    is_shard = getattr(module, "shard_over", None) is not None  # then any values are this rank's part of the weights
    for name, x in [*module._parameters.items(), *module._buffers.items()]:
        if x is not None and not is_shard:
            yield from _of_tensor(f"{path}.{name}", x)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield Change(f"{path}.{name} is frozen", _put(parameter.requires_grad_, False, True))
            other = nn.Parameter(parameter.detach().to(torch.bfloat16))
            yield Change(f"{path}.{name} in bfloat16", _attribute(module, name, other))
    for name, value in vars(module).items():
        if name not in vars(nn.Module()):
            yield from _of_value(f"{path}.{name}", value, functools.partial(setattr, module, name))
    yield Change(f"{path} in evaluation", _put(module.train, False, True))
    yield Change(f"evaluation of {path} alone", _attribute(module, "training", False))
    yield Change(f"a hook of {path}", _hook(module.register_forward_hook, lambda module, args, value: 2 * value))
    yield Change(f"a pre-hook of {path}", _hook(module.register_forward_pre_hook, lambda module, args: None))
    yield Change(f"a backward hook of {path}", _hook(module.register_full_backward_hook, lambda *_: None))
    if type(module).forward is not nn.Module.forward:
        yield Change(f"a forward of {path}", functools.partial(_own_forward, module))


@contextmanager
def _own_forward(module: nn.Module) -> Iterator[None]:
    before = vars(module).get("forward")
    module.forward = lambda *args, forward=module.forward, **named: forward(*args, **named)
    yield
    del module.forward
    if before is not None:
        module.forward = before


def _hook(register: Callable[[Any], Any], hook: Any) -> Callable[[], AbstractContextManager[None]]:
    @contextmanager
    def made() -> Iterator[None]:
        handle = register(hook)
        yield
        handle.remove()

    return made


def _of_function(function: Any) -> Iterator[Change]:
    if isinstance(function, functools.partial):
        held = {
            name: (x, functools.partial(function.keywords.__setitem__, name)) for name, x in function.keywords.items()
        }
    elif isinstance(function, FunctionType):
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        held = {name: (cell.cell_contents, functools.partial(setattr, cell, "cell_contents")) for name, cell in cells}
    else:
        held = {name: (x, functools.partial(setattr, function, name)) for name, x in vars(function).items()}
    for name, (value, put) in held.items():
        yield from (change._replace(hidden=True) for change in _of_value(name, value, put))


def _of_value(name: str, value: Any, put: Put) -> Iterator[Change]:
    if isinstance(value, bool):
        yield Change(f"not {name}", _put(put, not value, value))
    elif isinstance(value, int | float):
        yield Change(f"{name} grows", _put(put, value + 1 if isinstance(value, int) else 1.1 * value, value))
        yield Change(f"{name} is negated", _put(put, -value, value))
    elif isinstance(value, Tensor | np.ndarray):
        yield from _of_tensor(name, torch.as_tensor(value))
    elif isinstance(value, SimpleNamespace | Namespace):
        yield from _of_value(name, vars(value), lambda x: None)
    elif isinstance(value, MutableMapping):
        for key, x in value.items():
            yield from _of_value(f"{name}[{key!r}]", x, functools.partial(value.__setitem__, key))
    elif isinstance(value, MutableSequence):
        for index, x in enumerate(value):
            yield from _of_value(f"{name}[{index}]", x, functools.partial(value.__setitem__, index))


def _of_tensor(name: str, x: Tensor) -> Iterator[Change]:
    if x.numel():
        x = x.detach()
        first = x.clone()
        first.view(-1)[0] += 1
        negated = ~x if x.dtype == torch.bool else -x
        yield Change(f"{name} grows", _put(x.copy_, 1.1 * x if x.is_floating_point() else x + 1, x.clone()))
        yield Change(f"{name} is negated", _put(x.copy_, negated, x.clone()))
        yield Change(f"the first number of {name}", _put(x.copy_, first, x.clone()))


def _attribute(of: Any, name: str, value: Any) -> Callable[[], AbstractContextManager[None]]:
    return _put(functools.partial(setattr, of, name), value, getattr(of, name))


def _put(put: Put, value: Any, before: Any) -> Callable[[], AbstractContextManager[None]]:
    @contextmanager
    def made() -> Iterator[None]:
        put(value)
        yield
        put(before)

    return made
