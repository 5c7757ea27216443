"""What stands on which device, and asynchronous copies to the host, which never waits for an accelerator."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

on_cpu: Callable[[Tensor], bool] = attrgetter("is_cpu")
"""Whether the host can read the values of a tensor without waiting for another device."""


_DTYPES = (x for x in vars(torch).values() if isinstance(x, torch.dtype))
DIFFERENTIABLE = frozenset(x for x in _DTYPES if x.is_floating_point or x.is_complex)
"""The dtypes of tensors that may have a gradient."""


def as_real(x: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones."""
    return torch.view_as_real(x.resolve_conj())


def to_device_of_embeddings(args: Sequence[Any], named: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a loss's arguments with labels, masks and indices, which loaders leave on the CPU, beside its embeddings."""
    arguments = [x for x in (*args, *named.values()) if isinstance(x, Tensor)]
    device = next((x.device for x in arguments if x.is_floating_point() and x.ndim > 1), None)
    # one device is the usual case, at every call
    if device is None or device.type == "meta" or len({x.device for x in arguments}) < 2:
        return tuple(args), dict(named)

    def moved(x: Any) -> Any:
        return x.to(device) if isinstance(x, Tensor) and x.dtype not in DIFFERENTIABLE and not x.is_meta else x

    return tuple(map(moved, args)), {name: moved(x) for name, x in named.items()}


def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64: MPS does not, and some XPUs do not."""
    is_xpu = device.type == "xpu" and torch.xpu.is_available()
    return bool(torch.xpu.get_device_properties(device).has_fp64) if is_xpu else device.type != "mps"


def float32_matmuls() -> str:
    """Return how a GPU multiplies float32, ``"tf32"`` or ``"ieee"``, by torch's older setting or the newer."""
    matmuls: Any = torch.backends.cuda.matmul
    if hasattr(matmuls, "fp32_precision"):  # torch 2.9; reading the older setting after the newer was made is an error
        return "tf32" if matmuls.fp32_precision == "tf32" else "ieee"
    return "tf32" if matmuls.allow_tf32 else "ieee"


def device_problem(tensors: Mapping[str, Tensor]) -> str | None:
    floating = {name: x.device for name, x in tensors.items() if x.is_floating_point()}
    for (first, device), (name, other) in itertools.pairwise(floating.items()):
        if device != other:
            return (
                f"embeddings are on one device, got {first} on {device} and {name} on {other}. Move them with .to(...)."
            )
    return None


def state_problem(name: str, state: Tensor, rows: Tensor) -> str | None:
    if state.device == rows.device:
        return None
    return (
        f"{name} are on {state.device} and embeddings on {rows.device}. Move the loss, too: loss.to('{rows.device}')."
    )


def values_problem(module: nn.Module) -> str | None:
    is_split = False
    for part in (module, *module._modules.values()):
        for name, x in (*part._parameters.items(), *part._buffers.items()) if part is not None else ():
            if x is not None and x.is_meta:
                fix = "Call to_empty(device='cpu'), then load_state_dict(...)."
                return f"{name} is on the meta device and has no value. {fix}"
            is_split = is_split or hasattr(x, "device_mesh")  # a DTensor, whose class takes long to import
    return split_problem(module) if is_split else None


def is_fsdp(module: nn.Module) -> bool:
    """Return whether ``fully_shard`` was called with this module: a class of torch, which is not imported here."""
    return hasattr(type(module), "set_requires_gradient_sync")


def is_in_fsdp(module: nn.Module) -> bool:
    """Return whether ``fully_shard``, or FSDP1, was called with this module or one around it."""
    return "_is_fsdp_managed_module" in vars(module)


def split_problem(module: nn.Module) -> str | None:
    """Return which parameter of a loss is a DTensor that its formula would meet, in words, or None.

    A third-party loss may compute with DTensors, but not with those that FSDP gathers in another module's forward pass.
    """
    if is_fsdp(module):  # its own forward pass gathers
        return None
    of_others = not type(module).__module__.startswith("contrastive_zoo.") and not is_in_fsdp(module)
    if split := [] if of_others else [name for name, x in module._parameters.items() if hasattr(x, "device_mesh")]:
        return (
            f"{split[0]} is a DTensor, and the loss computes with plain parameters. Call the loss in the forward pass of "
            "the module that was sharded, or leave it out: fully_shard(module, ignored_params=set(loss_fn.parameters()))."
        )
    return next(filter(None, map(split_problem, module.children())), None)


class ValueCheck(NamedTuple):
    """A check of values on a device, of which the host reads a few integers or bools."""

    numbers: Tensor
    problem: Callable[[Sequence[float]], str | None]
    """Returns what is wrong, given the numbers, in words; None if nothing is."""


def read_later(x: Tensor) -> Callable[[], list[float]]:
    """Start to copy a small tensor to the host; call the returned function a step later, when the copy is complete."""
    flat = x.detach().flatten()
    if flat.device.type == "cpu":
        return flat.tolist
    copied = torch.Event(flat.device.type)
    copy = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True).copy_(flat, non_blocking=True)
    copied.record()

    def read() -> list[float]:
        copied.synchronize()
        return copy.tolist()

    return read
