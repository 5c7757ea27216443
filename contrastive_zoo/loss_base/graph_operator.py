"""Losses as a ``torch.library`` operator, so that ``torch.compile`` keeps them in its graph.

The operator ``contrastive_zoo::loss_and_gradients`` runs a loss eagerly, forward and backward with all messages between
ranks, and returns its value and the gradients; its autograd formula multiplies them by the incoming gradient. The compiler
sees a single operation: it traces neither the passes that a loss writes by hand nor the sizes of its blocks, and sends no
message. Only compiled code calls the operator: the dispatch of a custom operator takes longer than the loss of a small
batch.
"""

import ast
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from typing_extensions import Self

from contrastive_zoo.engine.precision import at_least_float32
from contrastive_zoo.ranks.compat import eager_autograd, in_order, recording
from contrastive_zoo.ranks.compiling import gradients_in_forward
from contrastive_zoo.ranks.world import World, alone

MODULES: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()  # the losses that the operator can compute, by id

NOT_REDUCED = "reduction='none' returns one value per anchor, and the operator of a compiled graph returns one number."

THIRD_PARTY = "it computes a third-party loss, which may return anything."


class GraphModule(nn.Module):
    """A module that compiled code calls as an operator.

    Attributes other than parameters are read when the operator runs, so that a changed one needs no other graph. Buffers
    may change then; the value is a number of dtype float32, or float64 for float64 embeddings.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Register the module for compiled graphs; copies and unpickled modules come by here, too."""
        module = super().__new__(cls)
        MODULES[id(module)] = module
        return module

    def graph_problem(self) -> str | None:
        """Return why a module that contains this one cannot be an operator, in words, or None; not for its submodules."""
        return None

    def traced_forward(self, *rows: Any, world: World | None = None, **named_rows: Any) -> Tensor | str:
        """Return :meth:`forward` as an operator of the graph that is being compiled, or why it cannot be one."""
        if world is not None:
            return "world= is passed. In compiled code call DistributedLoss, which passes its own."
        for module in self.modules():
            if isinstance(module, GraphModule) and (problem := module.graph_problem()) is not None:
                return problem
        has_buffers = any(True for _ in self.buffers())
        if has_buffers and any(
            isinstance(x, Tensor) and x.dtype == torch.float16 for x in (*rows, *named_rows.values())
        ):
            return (
                "float16 gradients are computed again in the backward pass, where its buffers would move a second time."
            )
        if not IN_ORDER and (has_buffers or not alone()):
            return "its messages or its buffers need operators that run in order, which torch has from 2.10 on."
        named, parameters = {key: x for key, x in named_rows.items() if x is not None}, dict(self.named_parameters())
        tensors: Any = [*(x for x in rows if x is not None), *named.values(), *parameters.values()]
        if not all(isinstance(x, Tensor) for x in tensors) or not (rows or named):
            return "an argument is no tensor."
        # the module, which positional arguments are tensors, not None, and the names of the other tensors
        call = (id(self), [x is not None for x in rows], list(named), list(parameters))
        learns = [torch.is_grad_enabled() and x.requires_grad for x in tensors]
        return loss_and_gradients(tensors, f"{call!r}", learns)[0]


_TAGS: Any = {"tags": torch.Tag.cudagraph_unsafe} if hasattr(torch.Tag, "cudagraph_unsafe") else {}  # from torch 2.9 on
"""A loss may read values from the device, which no CUDA graph can record."""


_ARGUMENTS = "Tensor[] tensors, str call, bool[] learns"  # torch 2.6 reads no list[Tensor]


@torch.library.custom_op(
    "contrastive_zoo::loss_and_gradients", mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor[]", **_TAGS
)
def loss_and_gradients(tensors: list[Tensor], call: str, learns: list[bool]) -> list[Tensor]:
    """Return the value of a loss, and its gradients unless :func:`_postponed`."""
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


IN_ORDER = all([in_order(loss_and_gradients), in_order(loss_gradients)])
"""Whether the compiler keeps operators in the order of the program: their messages are in the same order on every rank."""


def _postponed(tensors: Sequence[Tensor], learns: Sequence[bool]) -> bool:
    """Return whether the backward pass computes gradients: float16 represents them only times the scale of the loss."""
    return any(x.dtype == torch.float16 and learning for x, learning in zip(tensors, learns, strict=True))


def _gradients_like(tensors: Sequence[Tensor], learns: Sequence[bool]) -> list[Tensor]:
    return [x.new_empty(x.shape) for x, learning in zip(tensors, learns, strict=True) if learning]


def _computed(
    tensors: Sequence[Tensor], call: str, learns: Sequence[bool], grad_output: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Return the value of a loss and the gradients of some tensors, none of which shares memory."""
    loss, arguments, names, parameters = _parsed(call)
    with recording(), eager_autograd(), torch.set_grad_enabled(any(learns)), gradients_in_forward(any(learns)):
        tensors = [x.detach().requires_grad_(learning) for x, learning in zip(tensors, learns, strict=True)]
        remaining = iter(tensors)
        args = tuple(next(remaining) if is_given else None for is_given in arguments)
        named = {name: next(remaining) for name in names}
        with _holding(MODULES[loss], dict(zip(parameters, remaining, strict=True))):
            value = MODULES[loss](*args, **named)
        learnt = [x for x in tensors if x.requires_grad]
        gradients = torch.autograd.grad(value, learnt, grad_output, materialize_grads=True) if learnt else ()
    return value.detach().clone(), [x.clone(memory_format=torch.contiguous_format) for x in gradients]


@contextmanager
def _holding(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Within it a module's parameters are these, also in a submodule that occurs twice, unlike ``functional_call``."""
    new = {id(module.get_parameter(name)): x for name, x in tensors.items()}
    held: list[tuple[dict[str, Any], str, Tensor]] = [
        (part._parameters, name, x)
        for part in module.modules()
        for name, x in part._parameters.items()
        if x is not None
    ]
    try:
        for parameters, name, x in held:
            parameters[name] = new[id(x)]
        yield
    finally:
        for parameters, name, x in held:
            parameters[name] = x


_parsed = functools.lru_cache(1024)(ast.literal_eval)


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
