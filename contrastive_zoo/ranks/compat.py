"""What differs from version to version of torch, and every private name of it, in one place."""

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Rows of every rank into one tensor: ``all_gather_into_tensor`` until torch 2.12, ``all_gather_single`` since."""

reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""A sum of which each rank keeps its part: ``reduce_scatter_tensor`` until torch 2.12, ``reduce_scatter_single`` since."""

_TORCH = tuple(int(x) for x in torch.__version__.split(".")[:2])


def graph_break(reason: str) -> None:
    """Break the graph that is being compiled; from torch 2.7 on the compiler's message holds the reason."""
    if _TORCH >= (2, 7):
        torch._dynamo.graph_break(msg=reason)
    else:
        torch._dynamo.graph_break()


def in_order(operator: Any) -> bool:
    """Keep an operator in compiled graphs, in the order of the program, also where its value is not used.

    Return whether this torch can do so; from 2.10 on. ``operator.register_effect`` does the same, but loads the compiler.
    """
    try:
        from torch._library.effects import EffectType
    except ImportError:
        return False
    registered: Any = torch._library.simple_registry.singleton.find(operator._qualname)
    registered.effect.register(EffectType.ORDERED)
    return True


def every_size_a_symbol() -> AbstractContextManager[None]:
    """Within it ``torch.compile(dynamic=True)`` takes sizes for different ones that are equal in the first call."""
    import torch.fx.experimental._config as config  # loads the compiler

    return config.patch(use_duck_shape=False)  # type: ignore[attr-defined]  # every config module has it


def eager_autograd() -> AbstractContextManager[None]:
    """Within it ``torch.autograd.grad`` runs as written, also where compiled autograd would compile it."""
    from torch._dynamo import compiled_autograd  # loads the compiler, which called the operator that asks for this

    return compiled_autograd._disable()


def backward_pass() -> int:
    """The number of the backward pass that autograd runs in this thread; −1 outside of one."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Whether autograd runs a backward pass in this thread, within which a checkpoint calls modules again."""
    return backward_pass() != -1


def waiting_time(group: dist.ProcessGroup) -> float:
    """The seconds that a message of a process group may take."""
    try:
        seconds: float = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    except (RuntimeError, AttributeError):  # no backend of the CPU, or one without this option
        seconds = 600.0
    return seconds


def recording() -> AbstractContextManager[Any]:
    """Within it autograd records, though an operator runs below it."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


softplus: Any = torch._C._nn.softplus
"""``torch.nn.functional.softplus``, whose stub lacks ``out=``."""
