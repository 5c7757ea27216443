"""Losses of one process as a ``torch.library`` operator, so that ``torch.compile`` keeps them in its graph.

The operator ``contrastive_zoo::loss_and_gradients`` runs a loss function eagerly, forward and backward, and returns its
value and the gradients; its autograd formula multiplies them by the incoming gradient. The compiler sees a single operation,
so it traces neither the passes that a loss writes by hand nor the sizes of its blocks. Only compiled code calls the
operator: the dispatch of a custom operator takes longer than the loss of a small batch.
"""

import ast
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ParamSpec
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from contrastive_zoo.compiling import traced_as
from contrastive_zoo.engine.precision import at_least_float32
from contrastive_zoo.session import Session
from contrastive_zoo.world import ALONE, World

P = ParamSpec("P")

FUNCTIONS: dict[str, Callable[..., Tensor]] = {}
"""The loss functions that the operator can compute, by name."""

MODULES: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
"""The losses that are modules without a function, by id."""


def in_graph(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Return ``function``, which compiled code of one process calls as an operator; elsewhere the graph breaks at it.

    Arguments are tensors; settings are tensors, numbers, bools, strings, None or tuples of these. Its value
    has dtype float32, or float64 for float64 rows, and no dimension unless ``reduction="none"``.

    Examples:
        >>> import contrastive_zoo as cz
        >>> step = torch.compile(cz.NTXent(temperature=1.0), fullgraph=True, backend="eager")
        >>> step(torch.eye(2), torch.eye(2))
        tensor(0.5514)
    """
    name = function.__name__

    def traced(*rows: Any, world: World | None = None, **named: Any) -> Tensor | None:
        # a session has options of its own
        return operator_call(name, rows, named) if world is None or world == ALONE else None

    FUNCTIONS[name] = decorated = traced_as(traced)(function)
    return decorated


def operator_call(
    name: str, rows: Sequence[Tensor | None], named: Mapping[str, Any], *, check_finite: bool = True
) -> Tensor | None:
    """Return a loss function's value by the operator, or None where the operator cannot compute it.

    Args:
        name: the function's name.
        rows: its positional arguments.
        named: its keyword arguments without ``world``.
        check_finite: whether NaN and infinite rows are refused.

    Examples:
        >>> import contrastive_zoo as cz
        >>> operator_call("nt_xent", (torch.eye(2), torch.eye(2)), {"temperature": 1.0})
        tensor(0.5514)
    """
    while rows and rows[-1] is None:
        rows = rows[:-1]
    learnable = {key: x for key, x in named.items() if isinstance(x, Tensor)}
    settings = [(key, x) for key, x in named.items() if not isinstance(x, Tensor)]
    if named.get("reduction") == "none" or not all(_is_literal(x) for _, x in settings):
        return None
    return _called(name, rows, learnable, settings, check_finite)


def module_call(
    module: nn.Module, rows: Sequence[Tensor | None], named_rows: Mapping[str, Tensor], *, check_finite: bool = True
) -> Tensor | None:
    """Return the value of a module whose state is its parameters by the operator, or None where that cannot compute it.

    Other attributes of the module are read when the operator runs, so that a changed one needs no other graph.

    Args:
        module: a loss; :data:`MODULES` holds it.
        rows: its positional arguments.
        named_rows: its keyword arguments without ``world``.
        check_finite: whether NaN and infinite rows are refused.

    Examples:
        >>> import contrastive_zoo as cz
        >>> module_call(cz.Triplet(margin=0.5), (torch.eye(3)[[0, 0, 1]], torch.tensor([0, 0, 1])), {})
        tensor(0.)
    """
    has_state = any(True for _ in module.children()) or any(True for _ in module.buffers())
    if has_state or named_rows or getattr(module, "reduction", "none") == "none":
        return None
    return _called(id(module), rows, dict(module.named_parameters()), [], check_finite)


def _called(
    name: str | int,
    rows: Sequence[Tensor | None],
    named: Mapping[str, Tensor],
    settings: list[tuple[str, Any]],
    check_finite: bool,
) -> Tensor | None:
    tensors = [x for x in (*rows, *named.values()) if x is not None]
    if not rows or len(tensors) < len(rows) + len(named) or not all(isinstance(x, Tensor) for x in tensors):
        return None
    learns = [torch.is_grad_enabled() and x.requires_grad for x in tensors]
    return loss_and_gradients(tensors, f"{(name, list(named), settings, check_finite)!r}", learns)[0]


def _is_literal(x: object) -> bool:
    """Return whether ``ast.literal_eval`` reads x from its representation; it reads neither inf nor nan."""
    if isinstance(x, tuple):
        return all(_is_literal(part) for part in x)
    return x is None or isinstance(x, (bool, int, str)) or (isinstance(x, float) and math.isfinite(x))


_TAGS: Any = {"tags": torch.Tag.cudagraph_unsafe} if hasattr(torch.Tag, "cudagraph_unsafe") else {}  # from torch 2.9 on
"""A loss may read values from the device, which no CUDA graph can record."""


_ARGUMENTS = "Tensor[] tensors, str call, bool[] learns"  # torch 2.6 reads no list[Tensor]


@torch.library.custom_op(
    "contrastive_zoo::loss_and_gradients", mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor[]", **_TAGS
)
def loss_and_gradients(tensors: list[Tensor], call: str, learns: list[bool]) -> list[Tensor]:
    """Return the value of a loss function, and its gradients unless :func:`_postponed`.

    Args:
        tensors: rows, then the tensors among the settings.
        call: function name or id of a module, names of those settings, other settings, whether values are checked; a Python
            literal.
        learns: whether each tensor needs a gradient.
    """
    value, gradients = _computed(tensors, call, [x and not _postponed(tensors, learns) for x in learns])
    return [value, *gradients]


@loss_and_gradients.register_fake
def _(tensors: list[Tensor], call: str, learns: list[bool]) -> list[Tensor]:
    value = at_least_float32(tensors[0].new_empty(()))
    return [value] if _postponed(tensors, learns) else [value, *_gradients_like(tensors, learns)]


@torch.library.custom_op(
    "contrastive_zoo::loss_gradients",
    mutates_args=(),
    schema=f"(Tensor grad_output, {_ARGUMENTS}) -> Tensor[]",
    **_TAGS,
)
def loss_gradients(grad_output: Tensor, tensors: list[Tensor], call: str, learns: list[bool]) -> list[Tensor]:
    """Return the gradients of :func:`loss_and_gradients`, times ``grad_output``; the loss is computed again."""
    return _computed(tensors, call, learns, grad_output)[1]


@loss_gradients.register_fake
def _(grad_output: Tensor, tensors: list[Tensor], call: str, learns: list[bool]) -> list[Tensor]:
    return _gradients_like(tensors, learns)


def _postponed(tensors: Sequence[Tensor], learns: Sequence[bool]) -> bool:
    """Return whether the backward pass computes the gradients.

    float16 represents gradients only after they are multiplied by the scale of the loss.
    """
    return any(x.dtype == torch.float16 and learning for x, learning in zip(tensors, learns, strict=True))


def _gradients_like(tensors: Sequence[Tensor], learns: Sequence[bool]) -> list[Tensor]:
    return [x.new_empty(x.shape) for x, learning in zip(tensors, learns, strict=True) if learning]


def _computed(
    tensors: Sequence[Tensor], call: str, learns: Sequence[bool], grad_output: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Return the value of a loss function and the gradients of some tensors, none of which shares memory."""
    name, names, settings, check_finite = _parsed(call)
    with _autograd(), torch.set_grad_enabled(any(learns)):
        tensors = [x.detach().requires_grad_(learning) for x, learning in zip(tensors, learns, strict=True)]
        count = len(tensors) - len(names)
        named = dict(zip(names, tensors[count:], strict=True))
        world = Session.of(World(), check_finite=check_finite)
        if isinstance(name, str):
            value = FUNCTIONS[name](*tensors[:count], **named, **dict(settings), world=world)
        else:
            value = torch.func.functional_call(MODULES[name], named, tuple(tensors[:count]), {"world": world})
        learnt = [x for x in tensors if x.requires_grad]
        gradients = torch.autograd.grad(value, learnt, grad_output, materialize_grads=True) if learnt else ()
    return value.detach().clone(), [x.clone(memory_format=torch.contiguous_format) for x in gradients]


_parsed = functools.lru_cache(1024)(ast.literal_eval)


def _autograd() -> AbstractContextManager[Any]:
    """Within it autograd records, though an operator runs below it."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def _save(ctx: Any, inputs: tuple[list[Tensor], str, list[bool]], output: list[Tensor]) -> None:
    tensors, ctx.call, ctx.learns = inputs
    ctx.postponed = _postponed(tensors, ctx.learns)
    ctx.save_for_backward(*(tensors if ctx.postponed else output[1:]))


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[list[Tensor | None], None, None]:
    saved, g = list(ctx.saved_tensors), grads[0]
    gradients = loss_gradients(g, saved, ctx.call, ctx.learns) if ctx.postponed else [g * x for x in saved]
    remaining = iter(gradients)
    return [next(remaining) if learning else None for learning in ctx.learns], None, None


loss_and_gradients.register_autograd(_backward, setup_context=_save)
