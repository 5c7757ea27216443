"""Graphs that an engine differentiates itself, and what it says when its gradient is differentiated again."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from contrastive_zoo.compiling import Function


def saved_tensors_are_hooked() -> bool:
    """Whether an activation checkpoint, or another hook, takes what is saved for the backward pass.

    Examples:
        >>> saved_tensors_are_hooked()
        False
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


@contextmanager
def inner_graph() -> Iterator[None]:
    """Within it a graph is recorded and differentiated at once: hooks on saved tensors from outside do not see it.

    An activation checkpoint around a loss would otherwise compute the whole loss again for every block's gradient.

    Examples:
        >>> with torch.no_grad(), inner_graph():
        ...     torch.is_grad_enabled()
        True
    """
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        if saved_tensors_are_hooked():
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x))
        yield


class _Once(Function):
    """Identity on a hand-written gradient, whose own derivative is refused."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *inputs: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(
            "second derivative of a contrastive_zoo loss: the panel engines write the first one by hand and hold no "
            "graph of it. Compute the loss under `with contrastive_zoo.dense():`, which holds the N × N matrix and can "
            "be differentiated as often as you like."
        )


def once(gradient: Tensor | None, *inputs: Tensor) -> Tensor | None:
    """A gradient that says what to do when somebody differentiates it again."""
    return gradient if gradient is None or not torch.is_grad_enabled() else _Once.apply(gradient, *inputs)
