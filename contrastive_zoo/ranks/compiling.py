"""Passes that are written by hand: ``torch.compile`` leaves them as they are, and they refuse a second derivative."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from contrastive_zoo.ranks.compat import plain_results
from contrastive_zoo.ranks.messages import report

P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, at whose call a graph of ``torch.compile`` breaks: a trace would fix the sizes of the ranks' shards."""
    # torch.compiler.disable as the decorator would load the compiler at import, for more than a second

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            torch._dynamo.graph_break()  # so that an error of fullgraph=True shows this line: compile the encoder alone
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return run


class Function(torch.autograd.Function):
    """A function at whose backward pass a graph that is being compiled breaks off: a step may call ``backward()``, too.

    Within it tensors of a subclass are plain: one whose ``__torch_function__`` is torch's cannot hold a sparse gradient.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        with plain_results():
            return super().apply(*args)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "backward" in vars(cls):
            cls.backward = staticmethod(_reporting(cls.backward))  # type: ignore[method-assign]  # decorated


def _reporting(backward: Callable[..., Any]) -> Callable[..., Any]:
    """``backward``, which tells waiting ranks if it raises; a context with messages holds their world."""

    def run(ctx: Any, *gradients: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # of compiled autograd
            torch._dynamo.graph_break()
            return torch.compiler.disable(backward)(ctx, *gradients)
        try:
            with plain_results():
                return backward(ctx, *gradients)
        except BaseException as error:
            world = getattr(getattr(ctx, "sweep", ctx), "world", None)
            if world is not None:
                report(error, world)
            raise

    return run


def saved_tensors_are_hooked() -> bool:
    """Return whether hooks, such as a checkpoint's, intercept saved tensors; True where torch cannot tell, as 2.6."""
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("hooked"):  # refused if there are any
            return False
    except RuntimeError:
        return True


@contextmanager
def inner_graph() -> Iterator[None]:
    """Context manager: records a graph that is differentiated at once, for which a checkpoint computes nothing again."""
    unhooked = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.enable_grad(), unhooked if saved_tensors_are_hooked() else nullcontext():
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
            "graph of it. Compute the loss under `with contrastive_zoo.engine.plain_formulas():`, which holds the "
            "N × N matrix and can be differentiated any number of times."
        )


def differentiable_once(gradient: Tensor | None, *inputs: Tensor) -> Tensor | None:
    """Return a gradient that raises a RuntimeError, which names the fix, when it is differentiated again."""
    recorded = gradient is not None and torch.is_grad_enabled()
    return _DifferentiableOnce.apply(gradient, *inputs) if recorded else gradient
