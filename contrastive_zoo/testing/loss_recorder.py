"""A recorder of the loss that a training step calls: its parameters, and its inputs with their gradients."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves


def remove_hook(handle: Any) -> None:
    """Remove a hook that ``register_module_forward_hook`` or another function of torch has registered.

    torch (2.13) keeps a note of a removed hook's keyword arguments, which ``torch.compile`` takes for a hook and warns of.
    """
    handle.remove()
    module._global_forward_hooks_with_kwargs.pop(handle.id, None)
    module._global_forward_hooks_always_called.pop(handle.id, None)


class LossCall(NamedTuple):
    """One call of a loss."""

    loss: nn.Module  # the outermost module that received embeddings and returned a scalar
    embedding_gradients: list[Tensor]  # of its inputs [n, ...] that require gradients, zero before the backward pass
    position: int  # the number that count returned when the loss returned


class LossRecorder:
    """Records the losses called inside the context, as members of the model or not.

    A loss is a module that returns a scalar, or raises, and has an input that requires gradients. The encoder, and a model
    that returns its own loss, receive features, which require none. ``count`` is read when a loss returns: how many messages
    have been sent so far.
    """

    def __init__(self, count: Callable[[], int] = lambda: 0) -> None:
        self.count = count
        self.calls: list[LossCall] = []

    def __enter__(self) -> "LossRecorder":
        self._handles = [
            register_module_forward_pre_hook(allow_repeated_samples),
            register_module_forward_hook(self._record, with_kwargs=True, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            remove_hook(handle)

    def _record(self, module: nn.Module, args: Any, *rest: Any) -> None:
        *kwargs, output = rest
        raised = not kwargs  # torch passes keyword arguments only if the module has returned
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
        if not inputs or not (raised or _is_scalar(output)):
            return
        members = {id(member) for member in module.modules()}
        self.calls = [call for call in self.calls if id(call.loss) not in members]  # inner modules return first
        embeddings = [x for x in inputs if x.ndim > 1]  # not a scale or a temperature
        call = LossCall(module, [torch.zeros_like(x) for x in embeddings], self.count())
        for x, total in zip(embeddings, call.embedding_gradients, strict=True):
            x.register_hook(lambda gradient, total=total: _add(total, gradient))
        self.calls.append(call)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of all losses by name."""
        named: dict[str, nn.Parameter] = {}
        for index, call in enumerate(self.calls):
            for name, parameter in call.loss.named_parameters():
                if all(parameter is not other for other in named.values()):
                    named[f"loss{index or ''}.{name}"] = parameter
        return named


def allow_repeated_samples(loss: Any, inputs: object = None) -> None:
    """Switch off the check that ranks hold different embeddings, because drawn batches repeat samples."""
    if hasattr(loss, "check_distinct"):
        loss.check_distinct = False


def _is_scalar(output: Any) -> bool:
    tensors = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
    return bool(tensors) and tensors[0].ndim == 0 and tensors[0].requires_grad


def _add(total: Tensor, gradient: Tensor) -> None:  # a hook that returned a tensor would replace the gradient
    total += gradient.detach()
