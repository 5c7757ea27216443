"""A second device on a machine that has none: tensors that say they are there, hold values, and mix with no others."""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from contrastive_zoo.ranks import devices, fingerprint
from contrastive_zoo.ranks.world import World
from contrastive_zoo.wrapper import call_history

READS = {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select", "equal",
         "bincount"}  # fmt: skip
"""Operations for whose result, or its size, the host waits."""

INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}

SENDS_FROM_DEVICE: set[str] = set()
"""Names of process groups whose backend sends tensors of the device only, as NCCL does; others then send from the CPU."""

COPIES = {"_to_copy", "copy_", "copy", "_copy_from", "_local_scalar_dense"}


class OnDevice(Tensor):
    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor, device: torch.device) -> "OnDevice":
        settings: Any = {"dtype": values.dtype, "layout": values.layout, "requires_grad": values.requires_grad}
        layout = {"strides": values.stride(), "storage_offset": values.storage_offset()}
        found = Tensor._make_wrapper_subclass(cls, values.shape, **layout, device="meta", **settings)
        found.values, found.place = values.detach(), device
        return found

    @property
    def device(self) -> torch.device:
        return self.place

    @property
    def is_meta(self) -> bool:
        return False

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({self.values!r})"

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, new: "OnDevice") -> None:
        self.values = new.values

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def new_tensor(self, data: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return current().put(torch.tensor(data, dtype=dtype or self.dtype))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with current():
            return function(*args, **(kwargs or {}))


class Simulated(TorchDispatchMode):
    """Within it a device exists, of a type for which torch initialises nothing."""

    def __init__(self, device: str = "ipu:0", *, float64: bool = True) -> None:
        super().__init__()
        self.place, self.float64 = torch.device(device), float64
        self.reads: list[str] = []  # operations that read values of the device
        self.copies: list[str] = []  # copies of values of the device that the host reads a step later, without waiting
        # operations that copy values of the host to the device, for which the host waits unless their memory is pinned
        self.uploads: list[str] = []
        self.host_messages: list[int] = []  # bytes of the messages of CPU tensors

    def put(self, x: Any) -> Any:
        """Return a tensor of the device, or a copy of a module that is there."""
        if isinstance(x, nn.Module):
            return copy.deepcopy(x)._apply(lambda of_module: self.put(of_module.detach()))
        return OnDevice(x, self.place) if not isinstance(x, OnDevice) else x

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = function._schema.name.split("::")[1]
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        here = [x for x in tensors if isinstance(x, OnDevice)]
        target = kwargs.get("device")
        if here and name not in COPIES:
            indices = args[1] if name in INDEXED and isinstance(args[0], OnDevice) else ()
            allowed = {id(x) for x in indices}  # torch takes indices from the CPU, too
            mixed = [x for x in tensors if not isinstance(x, OnDevice) and x.ndim > 0 and id(x) not in allowed]
            assert not mixed, f"{name}: tensors on {self.place} and on the CPU, of shapes {[x.shape for x in tensors]}"
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        if name == "_pin_memory" or kwargs.pop("pin_memory", None):
            self.reads.append("pinned memory")
        if function.namespace == "c10d" and tensors:
            self._note_message(tree_leaves((args, kwargs)), tensors, bool(here))
        plain_args, plain = tree_map(lambda x: x.values if isinstance(x, OnDevice) else x, (args, kwargs))
        found = function(*plain_args, **plain)
        # C++ takes tensors of the device for meta tensors, and asks for others like them
        on_device = torch.device(target).type in (self.place.type, "meta") if target is not None else bool(here)
        if name in ("copy_", "copy"):
            on_device = isinstance(args[0], OnDevice)
        indices = [x for x in tree_leaves(args[1:2]) if isinstance(x, Tensor)]
        by_mask = name in INDEXED and any(x.dtype in (torch.bool, torch.uint8) for x in indices)
        if by_mask and name != "index" and args[2].numel() == 1:
            by_mask = False  # one number is written by masked_fill
        if here and (name in READS or by_mask or (name in COPIES and not on_device)):
            self.reads.append(name)
        if name in COPIES and on_device and any(not isinstance(x, OnDevice) for x in tensors):
            self.uploads.append(name)
        mutated = {id(x.values): x for x in here} | {id(x): x for x in tensors}

        def wrapped(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if id(x) in mutated:
                return mutated[id(x)]
            if on_device:
                assert self.float64 or x.dtype != torch.float64, f"{name}: {self.place} has no float64"
            return self.put(x) if on_device else x

        return tree_map(wrapped, found)

    def read_later(self, x: Tensor) -> Callable[[], list[float]]:
        """Stand in for :func:`contrastive_zoo.ranks.devices.read_later`."""
        if not isinstance(x, OnDevice):
            return x.detach().flatten().tolist
        self.copies.append("read_later")
        return x.values.flatten().tolist

    def _note_message(self, leaves: list[Any], tensors: list[Tensor], from_device: bool) -> None:
        objects = [x for x in leaves if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type())]
        for name in [dist.ProcessGroup.unbox(x).group_name for x in objects] if SENDS_FROM_DEVICE else []:
            place = self.place.type if from_device else "cpu"
            assert from_device == (name in SENDS_FROM_DEVICE), f"group {name}: no backend for device type {place}"
        if not from_device:
            self.host_messages.append(max(x.nbytes for x in tensors))


_modes: list[Simulated] = []


def current() -> Simulated:
    """Return a mode like the one that the tensors came from: autograd calls them outside of it."""
    return _modes[-1]


Put = Callable[[Any], Any]


def send_from_device() -> None:
    """Make this rank's process group send tensors of the device only, as NCCL does; numbers of the host get a group."""
    World.on_accelerators = property(lambda world: world.size > 1)  # type: ignore[assignment]  # a cached property
    World.device = property(lambda world: torch.device("ipu:0"))  # type: ignore[assignment]  # a cached property
    SENDS_FROM_DEVICE.add(dist.group.WORLD.group_name)


@contextmanager
def device(name: str = "ipu:0", *, float64: bool = True) -> Iterator[Simulated]:
    """Simulate a device with all that this library asks of one, also in backward passes."""
    mode = Simulated(name, float64=float64)
    with pytest.MonkeyPatch.context() as patching, mode:
        patching.setattr(sys.modules[__name__], "_modes", [*_modes, mode])
        for module in (call_history, fingerprint):  # there is no event of this device
            patching.setattr(module, "read_later", mode.read_later)
        kind, generator = name.split(":")[0], SimpleNamespace(get_rng_state=lambda _=None: torch.get_rng_state())
        generator.set_rng_state = generator.manual_seed = generator.manual_seed_all = lambda *_: None
        generator._is_in_bad_fork = lambda: False
        patching.setattr(torch, kind, generator, raising=False)
        patching.setattr(torch, "get_device_module", lambda device: generator)
        yield mode


def draws_of_a_device(name: str) -> AbstractContextManager[Any]:
    """Make a loss of the zoo draw on the CPU what it draws on an accelerator, which are other random numbers."""
    is_drawn = name.startswith(("SIGReg", "LeJEPA", "VISReg", "RDMReg"))
    return patch.object(devices, "on_cpu", lambda x: False) if is_drawn else nullcontext()


def on_cpu(found: Any) -> Any:
    return tree_map(lambda x: x.detach().cpu() if isinstance(x, Tensor) else x, found)


def value_and_gradients(loss: nn.Module, rows: list[Tensor]) -> list[Any]:
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in rows]
    value = loss(*leaves)
    weighted = (value * torch.arange(1, len(value) + 1, device=value.device)).sum() if value.ndim else value
    learnt = [x for x in (*leaves, *loss.parameters()) if x.requires_grad]
    state = [x.clone() for x in loss.buffers()]
    return [value, *torch.autograd.grad(weighted, learnt, allow_unused=True, materialize_grads=True), *state]
