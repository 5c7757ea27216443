"""What differs from version to version of torch, and every private name of it, in one place."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from datetime import timedelta
from threading import Lock
from typing import Any, cast

import torch
import torch.distributed as dist

# names since torch 2.12, and until then
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

backward_pass: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the number of the backward pass that autograd runs in this thread; −1 outside of one."""


def in_backward() -> bool:
    """Whether autograd runs a backward pass in this thread, within which a checkpoint calls modules again."""
    return backward_pass() != -1


def waiting_time(group: dist.ProcessGroup) -> float:
    """The seconds that a message of a process group may take."""
    try:
        return float(group._get_backend(group._device_types[0]).options._timeout.total_seconds())
    except (RuntimeError, AttributeError, IndexError):  # a backend without this option, or none
        return 600.0


def pause(group: dist.ProcessGroup, seconds: float) -> None:
    """Let other ranks go on; those in other threads of this process take turns."""
    getattr(group, "pause", time.sleep)(seconds)


softplus: Any = torch._C._nn.softplus
"""``torch.nn.functional.softplus``, whose stub lacks ``out=``."""

next_node: Any = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]  # torch's stub lacks it
"""The number that the next node of this thread's graphs gets."""

unseen: Any = torch._C.DisableTorchFunction
"""Context manager: modes of torch functions, such as spmd_types' checker, do not see what is called."""

plain_results: Any = torch._C.DisableTorchFunctionSubclass
"""Context manager: operations on a subclass such as fastai's TensorBase return a Tensor; modes still see them."""

_c10d: Any = dist.distributed_c10d


def messages_by_group() -> dict[dist.ProcessGroup, int]:
    """How many collectives this process has begun in each of its groups whose backend counts them."""
    result = dict[dist.ProcessGroup, int]()
    for group in [*_c10d._world.pg_map]:
        with suppress(RuntimeError):
            result[group] = int(group._get_sequence_number_for_group())
    return result


def group_of_one(of: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a new process group of this process alone, with the backends of another; nothing is sent."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch's stub lacks it
    named = {"group_name": "one process", "timeout": timedelta(seconds=waiting_time(of))}
    backends = dist.get_backend_config(of)
    # beside a default group NCCL would split its communicator, which all ranks do together
    with default_group(None):
        group, _ = _c10d._new_process_group_helper(1, 0, [], backends, store, **named)
    _c10d._world.pg_group_ranks[group] = {0: 0}
    # torch derives names of groups from the number of these, which must be equal on all ranks
    del _c10d._world.pg_names[group]
    return cast("dist.ProcessGroup", group)


_seen: ContextVar[dist.ProcessGroup | None] = ContextVar("default_group")
_lock, _entered = Lock(), 0
_of_all: tuple[Any, Any] = (None, None)  # the class that holds default groups, and its attribute of all threads

# LOCAL_RANK is none of them: it names the device of this process
_OF_ONE_PROCESS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
_launched: dict[str, str] = {}  # those of them that the launcher has set


def _write_variables() -> None:
    """Write torchrun's variables as they are in this thread's default group; the last one that leaves restores them."""
    group = _seen.get(None)
    if group is not None or not _entered:
        is_one = group is not None and group.size() == 1
        os.environ.update({name: _OF_ONE_PROCESS[name] for name in _launched} if is_one else _launched)


@contextmanager
def default_group(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Context manager: ``group`` is the default process group of this thread; None: torch.distributed is not initialised."""
    global _entered, _launched, _of_all
    token = _seen.set(group)
    with _lock:
        if not _entered:
            _launched = {name: os.environ[name] for name in _OF_ONE_PROCESS if name in os.environ}
            kind = type(_c10d._world)  # another one where ranks are threads
            _of_all = kind, (of_all := kind.default_pg)
            kind.default_pg = of_all.getter(lambda world: _seen.get(of_all.fget(world)))
        _entered += 1
        _write_variables()
    try:
        yield
    finally:
        with _lock:
            _entered -= 1
            if not _entered:
                kind, kind.default_pg = _of_all
            _seen.reset(token)
            _write_variables()


def unpacking_in(group: dist.ProcessGroup) -> AbstractContextManager[Any]:
    """Context manager: tensors are saved such that a checkpoint's hooks unpack them where ``group`` is the default group."""
    # torch cannot tell hooks before 2.8
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)(False)
    if hooks is None:
        return nullcontext()
    pack, unpack = hooks

    def unpack_in(packed: Any) -> torch.Tensor:
        with default_group(group):
            return cast("torch.Tensor", unpack(packed))

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack_in)
