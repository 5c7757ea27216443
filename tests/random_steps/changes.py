"""Everything that one rank can change before a step, or all ranks in code of the user's: each is undone afterwards."""

from collections.abc import Callable, Iterator, MutableMapping, MutableSequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

import contrastive_zoo as cz
from tests.random_steps.losses import Hides, HidesInCompute, OfAGenerator, times

Put = Callable[[Any], Any]
Rows = Callable[[list[Tensor]], list[Tensor]]


class Change(NamedTuple):
    what: str
    made: Callable[[], AbstractContextManager[object]] = nullcontext
    of_rows: Rows = lambda rows: rows
    hidden: bool = False  # ranks cannot read it: they may refuse one or two steps later
    right: bool = True  # whether steps are right if all ranks make it; otherwise they may refuse


def of_user_code(loss: Any) -> Iterator[Change]:
    """Yield what ranks cannot read: a hidden number, private generators, and a parameter that is not shared."""
    of_rank = partial(Change, hidden=True, right=False)
    if isinstance(loss, Hides):
        hide = partial(loss.hidden.__setitem__, "a closure")
        yield Change("a number in a closure", _put(hide, times(1.1), times(1.0)), hidden=True)
        held, hidden = OfAGenerator(), OfAGenerator()
        for kind, noise in (("hidden", lambda x: hidden(x)), ("held", held)):
            yield of_rank(f"noise of a {kind} generator", partial(patch.object, loss, "noise", noise))
    if isinstance(loss, HidesInCompute):  # rows draw from streams that ranks synchronise
        yield of_rank("noise of torch.rand", partial(patch.object, loss, "noise", torch.rand_like))
        yield of_rank("an unshared parameter", partial(patch.object, loss, "shares", "no"))


ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "float32 rows": lambda x: x.float(),
    "wider rows": lambda x: torch.cat([x, x[..., :1]], -1),
    "rows without gradient": lambda x: x.detach(),
    "NaN rows": lambda x: x * torch.nan,
    "rows of one more dimension": lambda x: x[:, None],
    "an expanded view": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "rows with the negative bit": lambda x: torch._neg_view(-x),
}
LABELS: dict[str, Callable[[Tensor], Tensor]] = {"short labels": Tensor.int, "labels as floats": Tensor.double}


def changes_of(wrapper: cz.DistributedLoss) -> Iterator[Change]:
    """Yield all changes of one rank."""

    def changed(of_floats: bool, change: Put, rows: list[Tensor]) -> list[Tensor]:
        return [change(x) if x.is_floating_point() == of_floats else x for x in rows]

    loss = wrapper.loss
    for what, change in (ROWS | LABELS).items():
        if what != "wider rows" or not getattr(loss, "takes_any_width", False):
            yield Change(what, of_rows=partial(changed, what in ROWS, change))
    yield Change("an argument less", of_rows=lambda rows: rows[:-1])
    yield Change("autocast", lambda: torch.autocast("cpu", torch.bfloat16))
    yield Change("no gradients", torch.no_grad)
    yield Change("inference mode", torch.inference_mode)
    yield Change("plain formulas", cz.engine.plain_formulas)
    yield Change("a default dtype", _put(torch.set_default_dtype, torch.float64, torch.float32))
    state = torch.Generator().manual_seed(99).get_state()
    yield Change("random states", _put(torch.set_rng_state, state, torch.get_rng_state()))
    other = {"grad_reduction": "sum" if wrapper.grad_reduction == "mean" else "mean", "ring": not wrapper.ring}
    for option, value in {**other, "check_finite": False, "check_equal": False, "check_distinct": False}.items():
        yield Change(f"{option}={value}", _put(partial(setattr, wrapper, option), value, getattr(wrapper, option)))
    yield Change("evaluation", _put(wrapper.train, False, True))
    yield from of_user_code(loss)
    for path, module in loss.named_modules() if isinstance(loss, nn.Module) else ():
        yield from _of_module(path or "the loss", module)
    if isinstance(loss, partial):
        yield from (change._replace(hidden=True) for change in _of_value("its settings", loss.keywords))
    elif not isinstance(loss, nn.Module):
        for name, x in zip(loss.__code__.co_freevars, loss.__closure__, strict=True):
            found = _of_value(name, x.cell_contents, partial(setattr, x, "cell_contents"))
            yield from (change._replace(hidden=True) for change in found)


def _of_module(path: str, module: nn.Module) -> Iterator[Change]:
    is_shard = getattr(module, "shard_over", None) is not None  # then any values are this rank's part of the weights
    for name, x in [*module._parameters.items(), *module._buffers.items()]:
        if x is not None and not is_shard:
            yield from _of_value(f"{path}.{name}", x)
        if isinstance(x, nn.Parameter):
            yield Change(f"{path}.{name} is frozen", _put(x.requires_grad_, False, True))
            other = nn.Parameter(x.detach().to(torch.bfloat16))
            yield Change(f"{path}.{name} in bfloat16", _put(partial(setattr, module, name), other, x))
    for name, value in vars(module).items():
        if name not in vars(nn.Module()):
            yield from _of_value(f"{path}.{name}", value, partial(setattr, module, name))
    yield Change(f"{path} in evaluation", _put(module.train, False, True))
    yield Change(f"evaluation of {path} alone", partial(patch.object, module, "training", False))
    # handles are context managers
    yield Change(f"a hook of {path}", lambda: module.register_forward_hook(lambda module, args, value: 2 * value))
    yield Change(f"a pre-hook of {path}", lambda: module.register_forward_pre_hook(lambda module, args: None))
    yield Change(f"a backward hook of {path}", lambda: module.register_full_backward_hook(lambda *_: None))
    if type(module).forward is not nn.Module.forward:
        forward = module.forward
        other = lambda *args, **named: forward(*args, **named)  # noqa: E731 - no name of a function of its own
        yield Change(f"a forward of {path}", lambda: patch.object(module, "forward", other))


def _of_value(name: str, value: Any, put: Put = lambda x: None) -> Iterator[Change]:
    if isinstance(value, SimpleNamespace):
        value = vars(value)
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, bool):
        yield Change(f"not {name}", _put(put, not value, value))
    elif isinstance(value, int | float):
        yield Change(f"{name} grows", _put(put, value + 1 if isinstance(value, int) else 1.1 * value, value))
        yield Change(f"{name} is negated", _put(put, -value, value))
    elif isinstance(value, Tensor) and value.numel():
        x = value.detach()
        first = x.clone()
        first.view(-1)[0] += 1
        yield Change(f"{name} grows", _put(x.copy_, 1.1 * x if x.is_floating_point() else x + 1, x.clone()))
        yield Change(f"{name} is negated", _put(x.copy_, ~x if x.dtype == torch.bool else -x, x.clone()))
        yield Change(f"the first number of {name}", _put(x.copy_, first, x.clone()))
    elif isinstance(value, MutableMapping | MutableSequence):
        for key, x in [*value.items()] if isinstance(value, MutableMapping) else [*enumerate(value)]:
            yield from _of_value(f"{name}[{key!r}]", x, partial(value.__setitem__, key))


def _put(put: Put, value: Any, before: Any) -> Callable[[], AbstractContextManager[None]]:
    @contextmanager
    def made() -> Iterator[None]:
        put(value)
        yield
        put(before)

    return made
