"""A recorder of the loss that a training step calls: its parameters, and its inputs with their gradients."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves


def remove_hook(handle: Any) -> None:
    """Remove a hook that ``register_module_forward_hook`` or another function of torch has registered.

    torch (2.13) keeps a note of a removed hook's keyword arguments, which ``torch.compile`` takes for a hook and warns of.

    Examples:
        >>> handle = module.register_module_forward_hook(print, with_kwargs=True, always_call=True)
        >>> remove_hook(handle)
        >>> module._has_any_global_hook()
        OrderedDict()
    """
    handle.remove()
    module._global_forward_hooks_with_kwargs.pop(handle.id, None)
    module._global_forward_hooks_always_called.pop(handle.id, None)


@dataclass
class LossCall:
    """One call of a loss.

    Attributes:
        loss: the outermost module that received embeddings and returned a scalar.
        embeddings: its inputs [n, ...] that require gradients.
        gradients: their gradients, after the backward pass.
        position: number that ``count`` returned when the loss returned.
    """

    loss: nn.Module
    embeddings: list[Tensor]
    position: int
    gradients: dict[int, Tensor] = field(default_factory=dict)

    @property
    def embedding_gradients(self) -> list[Tensor]:
        """Return the gradient of every input, zero for one that got none."""
        return [self.gradients.get(index, torch.zeros_like(x)) for index, x in enumerate(self.embeddings)]


class LossRecorder:
    """Records the losses called inside the context, as members of the model or not.

    A loss is a module that returns a scalar, or raises, and has an input that requires gradients. The encoder, and a model
    that returns its own loss, receive features, which require none.

    Args:
        count: a counter read when a loss returns, for example of the messages sent so far.

    Examples:
        >>> linear, loss = nn.Linear(2, 2), nn.SoftMarginLoss()
        >>> with LossRecorder() as recorder:
        ...     value = loss(linear(torch.ones(3, 2)), torch.ones(3, 2))
        >>> recorder.calls[0].loss is loss, len(recorder.calls)
        (True, 1)
    """

    def __init__(self, count: Callable[[], int] = lambda: 0) -> None:
        self.count = count
        self.calls: list[LossCall] = []

    def __enter__(self) -> "LossRecorder":
        self._handles = [
            register_module_forward_pre_hook(_allow_repeated_samples),
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
        call = LossCall(module, [x.detach() for x in embeddings], self.count())
        for index, x in enumerate(embeddings):
            x.register_hook(lambda gradient, index=index: _add(call.gradients, index, gradient))
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


def allow_repeated_samples(loss: Any) -> Any:
    """Switch off the check that ranks hold different embeddings, because drawn batches repeat samples; return the loss."""
    if hasattr(loss, "check_distinct"):
        loss.check_distinct = False
    return loss


def _allow_repeated_samples(module: nn.Module, inputs: Any) -> None:
    allow_repeated_samples(module)


def _is_scalar(output: Any) -> bool:
    tensors = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
    return bool(tensors) and tensors[0].ndim == 0 and tensors[0].requires_grad


def _add(gradients: dict[int, Tensor], index: int, gradient: Tensor) -> None:
    gradients[index] = gradients.get(index, torch.zeros_like(gradient)) + gradient.detach()
