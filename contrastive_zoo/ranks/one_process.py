"""A third-party loss sees one process: what it sends by itself, in its forward and its backward pass, goes to itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from gc import get_referents
from operator import itemgetter
from types import FunctionType, ModuleType
from typing import Any, TypeVar
from weakref import ref

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves

from contrastive_zoo.ranks.compat import default_group, group_of_one, messages_by_group, next_node, unpacking_in
from contrastive_zoo.ranks.compiling import saved_tensors_are_hooked, uncompiled
from contrastive_zoo.ranks.messages import state_of
from contrastive_zoo.ranks.world import World

if not dist.is_initialized():
    # its functions hold the default group of the time at which it is imported
    import torch.distributed.nn.functional  # noqa: F401 - imported for its defaults

R = TypeVar("R")


def in_one_process(compute: Callable[[], R], name: str, world: World, loss: Any = None) -> R:
    """What ``compute()`` returns where torch.distributed consists of this process, also in its functions' backward passes.

    In hooks of tensors and in other threads, torch.distributed is unchanged. Messages to ranks of ``world``, by its process
    group, the default one or one that ``compute`` holds, are an error that begins with ``name``, unless ``loss`` is in DDP
    or FSDP.
    """
    default = dist.group.WORLD
    if default is None or default.size() == 1:
        return compute()
    group, first = None if _is_distributed(loss) else world.process_group, next_node()
    with unpacking_in(default), _alone(default, group, name, compute):
        value = compute()
    # a checkpoint around the call sends messages of its own in the backward pass
    group = None if saved_tensors_are_hooked() else group
    for node in _python_functions(value, first):
        # the node in it would be a reference cycle, in which the embeddings stay in memory
        node.apply = partial(_backward, ref(node), default, group, name)
    return value


@uncompiled
def _backward(
    node: Callable[[], Any], default: dist.ProcessGroup, group: dist.ProcessGroup | None, name: str, *gradients: Any
) -> Any:
    with _alone(default, group, name, node()):
        return type(node()).apply(node(), *gradients)


@contextmanager
def _alone(default: dist.ProcessGroup, group: dist.ProcessGroup | None, name: str, holder: Any) -> Iterator[None]:
    """Context manager: this thread's default group is this process; messages to ranks of ``group`` are refused afterwards.

    Another thread may send by further groups, as a checkpoint in the background does: of these, ``holder`` must hold them.
    """
    before = {} if group is None else messages_by_group()

    def refuse() -> None:
        after = {} if group is None else messages_by_group()
        sent = {
            by: n for by, total in after.items() if (n := total - before.get(by, total)) and _share_ranks(by, group)
        }
        count = sum(n for by, n in sent.items() if by in (group, default) or _holds(holder, by))
        if count:
            raise ValueError(f"{name}: {_HOLDS_A_GROUP.format(count=count, s='s' * (count != 1))}")

    try:
        with default_group(this_process(default)):
            yield
    except Exception:
        refuse()  # W times the rows that the loss expects are an error of its own, which does not say why
        raise
    refuse()


def this_process(default: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the group of this process alone beside a default group; it is made once."""
    state = state_of(default)
    if state.alone is None:
        state.alone = group_of_one(default)
    return state.alone


def _is_distributed(loss: Any) -> bool:
    """Whether DDP or FSDP holds a loss, or its parameters are split over ranks: its messages are no mistake."""
    if not isinstance(loss, nn.Module):
        return False
    wrappers = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
    names = {x.__name__ for module in loss.modules() for x in type(module).__mro__}
    return not wrappers.isdisjoint(names) or any(hasattr(x, "device_mesh") for x in loss.parameters())


def _share_ranks(*groups: Any) -> bool:
    first, second = ({*dist.get_process_group_ranks(group)} for group in groups)
    return len(first & second) > 1


def _holds(holder: Any, group: dist.ProcessGroup) -> bool:
    """Whether a group is in an object's attributes, items or closures, or in those of what it holds."""
    objects, seen = [holder], dict[int, Any]()
    while objects:
        x = objects.pop()
        if x is group:
            return True
        if id(x) not in seen and not isinstance(x, (type, ModuleType)):
            seen[id(x)] = x
            is_function = isinstance(x, FunctionType)  # which also refers to all names of its module
            objects += [x.__closure__, x.__defaults__, x.__kwdefaults__, vars(x)] if is_function else get_referents(x)
    return False


def is_gathered(value: Any) -> bool:
    """Return whether tensors come from a differentiable gather, of this library or of anybody else's autograd functions."""
    names = (f"{node._forward_cls.__module__}.{type(node).__name__}".lower() for node in _python_functions(value))
    return any("gather" in name or "contrastive_zoo.ranks" in name for name in names)


def _python_functions(value: Any, first: int = 0) -> Iterator[Any]:
    """The autograd functions in Python in a graph from a node on: older ones, the encoder's, send between all ranks."""
    visited: set[Any] = {None}
    nodes: list[Any] = [x.grad_fn for x in tree_leaves(value) if isinstance(x, Tensor)]
    while nodes:
        node = nodes.pop()
        if node in visited or node._sequence_nr() < first:
            continue
        visited.add(node)
        if isinstance(node, BackwardCFunction):
            yield node
        nodes += map(itemgetter(0), node.next_functions)


_HOLDS_A_GROUP = (
    "it sends {count} message{s} by a process group that it holds, but every rank computes it from the rows of all ranks, "
    "which count W times then. Construct it without a process group, so that it takes the default group when it is called, "
    "or switch its gathering off. A default argument holds a group, too: before init_process_group import the loss, and "
    "torch.distributed.nn.functional."
)
