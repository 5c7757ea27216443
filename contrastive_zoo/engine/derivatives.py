"""Differentiate inner graphs within an engine, and refuse the second derivative of hand-written gradients."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from contrastive_zoo.compiling import Function


def saved_tensors_are_hooked() -> bool:
    """Return whether an activation checkpoint, or another hook, intercepts the tensors saved for the backward pass.

    True with a torch that cannot tell, such as 2.6: logits are then recomputed, never cached.

    Examples:
        >>> saved_tensors_are_hooked()
        False
    """
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("hooked"):  # refused if there are any
            return False
    except RuntimeError:
        return True


@contextmanager
def inner_graph() -> Iterator[None]:
    """Record a graph that is differentiated at once, hidden from outer hooks on saved tensors.

    Without this, an activation checkpoint around a loss computes the whole loss again for the gradient of every block.

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


class _DifferentiableOnce(Function):
    """Return a hand-written gradient unchanged; raise when that gradient is differentiated."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *inputs: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(
            "second derivative of a contrastive_zoo loss: the engines write the first derivative by hand and hold no "
            "graph of it. Compute the loss under `with contrastive_zoo.dense():`, which holds the N × N matrix and can "
            "be differentiated any number of times."
        )


def differentiable_once(gradient: Tensor | None, *inputs: Tensor) -> Tensor | None:
    """Return a gradient that raises a RuntimeError, which names the fix, when it is differentiated again."""
    recorded = gradient is not None and torch.is_grad_enabled()
    return _DifferentiableOnce.apply(gradient, *inputs) if recorded else gradient
