"""The losses that a training step calls, as members of its model or not."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


@contextmanager
def replaced(home: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace a function of a module or class by one that gets the original as its first argument."""
    original = getattr(home, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    defined = inspect.getattr_static(home, name)  # a class method, and not that of the class
    setattr(home, name, call)
    try:
        yield
    finally:
        setattr(home, name, defined)


class LossCall(NamedTuple):
    loss: nn.Module  # the outermost module that received embeddings and returned a scalar
    embedding_gradients: list[Tensor]  # of its inputs [n, ...] that require gradients, zero before the backward pass
    position: int  # the number that count returned when the loss returned


class LossRecorder:
    """Records the calls of losses inside the context of :meth:`recording`.

    A loss is a module that returns a scalar, or raises, and has an input that requires gradients. The encoder, and a model
    that returns its own loss, receive features, which require none. ``count`` is read when a loss returns: how many messages
    have been sent so far.
    """

    def __init__(self, count: Callable[[], int] = lambda: 0) -> None:
        self.count = count
        self.calls: list[LossCall] = []

    def recording(self) -> Any:
        return replaced(nn.Module, "_call_impl", self._on_call)

    def _on_call(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(module, *args, **kwargs)
        allow_repeated_samples(module)
        try:
            output = original(module, *args, **kwargs)
        except BaseException:
            self._record(module, (args, kwargs))
            raise
        tensors = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
        if tensors and tensors[0].ndim == 0 and tensors[0].requires_grad:
            self._record(module, (args, kwargs))
        return output

    def _record(self, module: nn.Module, arguments: Any) -> None:
        inputs = [x for x in tree_leaves(arguments) if isinstance(x, Tensor) and x.requires_grad]
        if not inputs:
            return
        members = {id(member) for member in module.modules()}
        self.calls = [call for call in self.calls if id(call.loss) not in members]  # inner modules return first
        embeddings = [x for x in inputs if x.ndim > 1]  # not a scale or a temperature
        call = LossCall(module, [torch.zeros_like(x) for x in embeddings], self.count())
        for x, total in zip(embeddings, call.embedding_gradients, strict=True):
            x.register_hook(functools.partial(_add, total))
        self.calls.append(call)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        named: dict[str, nn.Parameter] = {}
        for index, call in enumerate(self.calls):
            for name, parameter in call.loss.named_parameters():
                if all(parameter is not other for other in named.values()):
                    named[f"loss{index or ''}.{name}"] = parameter
        return named


def allow_repeated_samples(loss: Any) -> None:
    """Switch off the check that ranks hold different embeddings, because drawn batches repeat samples."""
    if hasattr(loss, "check_distinct"):
        loss.check_distinct = False


def _add(total: Tensor, gradient: Tensor) -> None:  # a hook that returned a tensor would replace the gradient
    total += gradient.detach()
