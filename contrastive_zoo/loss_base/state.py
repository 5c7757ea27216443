"""The tensors of a loss: how they are made, moved and loaded, and how a call that fails leaves them as they were."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from contrastive_zoo.ranks.row_checks import described


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers of a module, by name, without those of its submodules."""
    buffers = {name: x for name, x in module._buffers.items() if name not in module._non_persistent_buffers_set}
    return {name: x for name, x in {**module._parameters, **buffers}.items() if x is not None}


def loading_problem(tensors: Mapping[str, Tensor], state_dict: Mapping[str, Any], prefix: str = "") -> str | None:
    """What is wrong with the saved tensors of these names, in words; None if nothing is. Missing ones are torch's matter."""
    for name, present in tensors.items():
        saved = state_dict.get(prefix + name, present)
        same_kind = isinstance(saved, Tensor) and saved.is_floating_point() == present.is_floating_point()
        if not same_kind or saved.shape != present.shape:
            here, there = described(present), described(saved)
            return f"{name} is {here} here, the state dict holds {there}. Construct it with the same sizes."
        has_values = not saved.is_meta and not hasattr(saved, "device_mesh")  # of a DTensor, other ranks hold the rest
        if saved is not present and has_values and not saved.isfinite().all():
            return f"{name} holds NaN or infinite values in the state dict. Take an earlier checkpoint."
    return None


class WholeState(nn.Module):
    """A module that loads all of its own tensors or none: a centre without its prototypes would be another loss's."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, parameter in self.named_parameters(recurse=False):
            saved = state_dict.get(prefix + name)
            if isinstance(saved, Tensor) and saved.ndim == 0 and parameter.shape == (1,):
                state_dict[prefix + name] = saved.reshape(1)  # earlier versions saved [], which FSDP cannot shard
        tensors = own_tensors(self)
        saved = {name: state_dict[prefix + name] for name in tensors if prefix + name in state_dict}
        if problem := loading_problem(tensors, state_dict, prefix) or self.state_problem(saved):
            *_, error_messages = args
            error_messages.append(f"{type(self).__name__}: {problem} It stays as it was.")
        else:
            super()._load_from_state_dict(state_dict, prefix, *args)

    def state_problem(self, saved: Mapping[str, Tensor]) -> str | None:
        """Return what is wrong with saved tensors of the right shapes, by name, in words, or None."""
        return None


@contextmanager
def state_kept_on_error(module: nn.Module) -> Iterator[None]:
    """Run the body; if it raises, every buffer of the module is what it was before.

    This is for calls that continue after a state has moved: a batch that is stored before it is compared, a sum of losses.
    Only buffers that have changed are written back: autograd may have saved the others.
    """
    places = [(x._buffers, name) for x in module.modules() for name in x._buffers]
    before = [(of, name, x, x.clone()) for of, name in places if (x := of[name]) is not None]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for of, name, x, values in before:
                # by value: batch_norm changes its statistics without a new version
                of[name] = x if torch.equal(x, values) else x.copy_(values)
        raise


def real(x: Any) -> Any:
    """Return a tensor of shape [1] as [], and a Python or NumPy number as float: these would change a loss by promotion."""
    if isinstance(x, Tensor):
        return x.reshape(()) if x.shape == (1,) else x
    is_number = isinstance(x, (int, np.integer, np.floating)) and not isinstance(x, bool)
    return float(x) if is_number else x


def move_towards(state: Tensor, target: Tensor, share: float | Tensor) -> None:
    """Move ``state`` in place by a share of the way to ``target``; a share that is a tensor may have any dtype."""
    state.lerp_(target.to(state), real(share).to(state) if isinstance(share, Tensor) else share)


T = TypeVar("T")


def allocate(caller: str, make: Callable[[], T], **sizes: int) -> T:
    """Return ``make()``, a tensor or an array whose shape consists of these settings."""
    try:
        return make()
    except (RuntimeError, MemoryError, ValueError) as error:
        arguments = ", ".join(f"{name}={size}" for name, size in sizes.items())
        reason = f"{error}".partition("\n")[0][:120] or type(error).__name__
        raise ValueError(f"{caller}: nothing can be made of {arguments} ({reason}). Pass smaller sizes.") from error
