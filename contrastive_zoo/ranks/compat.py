"""What differs from version to version of torch, and every private name of it, in one place."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, cast

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


def messages_of(group: dist.ProcessGroup) -> int:
    """How many collectives this process has begun in a group; 0 of a backend that does not count them."""
    try:
        begun: int = group._get_sequence_number_for_group()  # type: ignore[attr-defined]  # torch's stub lacks it
    except RuntimeError:
        begun = 0
    return begun


def group_of_one(name: str) -> dist.ProcessGroup:
    """Make a process group of this process alone, with the backends of the default group; nothing is sent."""
    c10d: Any = dist.distributed_c10d
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch's stub lacks it
    real, backend, waits = dist.group.WORLD, dist.get_backend_config(), timedelta(seconds=600)
    dist.GroupMember.WORLD = (
        None  # otherwise NCCL splits the communicator of the default group, which all ranks do together
    )
    try:
        group, _ = c10d._new_process_group_helper(
            1, 0, [], backend, store, group_name=name, timeout=waits, group_desc=name
        )
    finally:
        dist.GroupMember.WORLD = real
    c10d._world.pg_group_ranks[group] = {0: 0}
    del c10d._world.pg_names[group]  # torch derives names of groups from their number, which must be equal on all ranks
    return cast("dist.ProcessGroup", group)


def is_group(group: dist.ProcessGroup) -> bool:
    """Whether torch.distributed knows a group, which it forgets when it is shut down."""
    return group in dist.distributed_c10d._world.pg_map


replaced_groups: list[dist.ProcessGroup | None] = []
"""The default groups that :func:`default_group` has replaced, the last one last."""


@contextmanager
def default_group(group: dist.ProcessGroup, name: str) -> Iterator[None]:
    """Within it ``group`` is the default process group."""
    real = dist.group.WORLD
    names: Any = dist.distributed_c10d._world.pg_names
    is_nested = group in names  # a checkpoint computes the loss anew within its backward pass
    dist.GroupMember.WORLD, names[group] = group, name
    replaced_groups.append(real)
    try:
        yield
    finally:
        dist.GroupMember.WORLD = real
        replaced_groups.pop()
        if not is_nested:
            del names[group]


backward_calls = 0
"""How often :func:`group_before` was entered: messages since then are not those of a loss that sees one process."""


@contextmanager
def group_before() -> Iterator[None]:
    """Within it the default group is the one that :func:`default_group` has replaced."""
    global backward_calls
    backward_calls += 1
    present = dist.group.WORLD
    dist.GroupMember.WORLD = replaced_groups.pop()
    replaced, replaced_groups[:] = [*replaced_groups, dist.group.WORLD], []
    try:
        yield
    finally:
        dist.GroupMember.WORLD, replaced_groups[:] = present, replaced


def next_node() -> int:
    """The number that the next node of this thread's graphs gets."""
    with torch.enable_grad():
        node: Any = torch.zeros((), requires_grad=True).clone().grad_fn
    number: int = node._sequence_nr()
    return number + 1


class _OtherBackward:
    """A Python autograd function in all but its backward pass, as a node of a graph looks it up."""

    vjp = staticmethod(torch.autograd.Function.vjp)  # the other name of backward, which a function may not have then

    def __init__(self, function: Any, backward: Callable[..., Any]) -> None:
        self._function, self.backward = function, backward

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


def run_backward_by(node: Any, backward: Callable[..., Any]) -> None:
    """Let a node of a Python autograd function call ``backward(function's backward, ctx, *gradients)``."""
    # the node is not held: it would be a reference cycle, in which the embeddings stay in memory
    node._forward_cls = _OtherBackward(node._forward_cls, partial(backward, node._get_user_fn()))
