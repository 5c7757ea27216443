"""The original loss behind a translation: it computes the calls that this library's loss does not take."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from pytorch_metric_learning import losses
from torch import Tensor, nn

from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.wrapper.pml.meaning import members
from contrastive_zoo.wrapper.pml.native.translation import to_native

_OF_VIEWS = (losses.SelfSupervisedLoss, losses.VICRegLoss)


class Original(NamedTuple):
    """The loss and the miner that were translated.

    The native loss takes embeddings with labels, or two views. The original computes calls with other arguments
    (``indices_tuple``, ``ref_emb``) from the native loss's weights.
    """

    loss: nn.Module
    miner: Callable[..., Any] | None

    def native_arguments(self, arguments: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """Return the native loss's positional arguments; None if only the original takes these arguments."""
        names = ("embeddings", "ref_emb" if type(self.loss) in _OF_VIEWS else "labels")
        inputs = {name for name, x in arguments.items() if x is not None}
        return tuple(arguments[name] for name in names) if inputs == set(names) else None

    def with_weights_of(self, native: Loss) -> Callable[..., Any]:
        """Return the original as a function of its arguments and the native loss's weights, which get the gradient."""
        weights = _original_weights(self.loss, native)
        return lambda *args, **kwargs: torch.func.functional_call(self.loss, weights, args, kwargs)


def native_and_original(loss: nn.Module, miner: Callable[..., Any] | None = None) -> tuple[Loss, Original]:
    """Return :func:`to_native` of the loss, and the original.

    Raises:
        ValueError: there is no exact translation.
    """
    return to_native(loss, miner), Original(loss, miner)


def _original_weights(loss: Any, native: Any, prefix: str = "") -> dict[str, Tensor]:
    """Return the native loss's weights by the original's parameter names, in the original's layout."""
    weights: dict[str, Tensor] = {}
    if isinstance(loss, losses.MultipleLosses):
        keys = loss.losses if loss.is_dict else range(len(loss.losses))
        for key, (original, *_), member in zip(keys, members(loss), native.losses, strict=True):
            weights |= _original_weights(original, member, f"{prefix}losses.{key}.")
        return weights
    for name in ("W", "fc", "proxies"):
        if isinstance(getattr(loss, name, None), nn.Parameter):
            x: Tensor = native.weights
            weights[prefix + name] = x if name == "proxies" else x.reshape(-1, x.shape[-1]).T
    if isinstance(loss, losses.MarginLoss):
        if loss.learn_beta:
            weights[f"{prefix}beta"] = native.beta.reshape(loss.beta.shape)
        else:
            loss.beta = native.beta.detach().reshape(loss.beta.shape)
    return weights
