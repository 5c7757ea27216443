"""A third-party loss sees one process: what it sends by itself, in its forward and its backward pass, goes to itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar
from weakref import ref

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves

from contrastive_zoo.ranks.compat import default_group, group_of_one, messages_of, next_node, unpacking_in
from contrastive_zoo.ranks.compiling import saved_tensors_are_hooked, uncompiled
from contrastive_zoo.ranks.messages import state_of
from contrastive_zoo.ranks.world import World

if not dist.is_initialized():
    # its functions hold the default group of the time at which it is imported
    import torch.distributed.nn.functional  # noqa: F401 - imported for its defaults

R = TypeVar("R")


def in_one_process(compute: Callable[[], R], name: str, world: World, loss: Any = None) -> R:
    """What ``compute()`` returns where torch.distributed consists of this process, also in its functions' backward passes.

    In hooks of tensors and in other threads, torch.distributed is unchanged. Messages by the process group of ``world`` are
    an error that begins with ``name``, unless ``loss`` is in DDP or FSDP.
    """
    default = dist.group.WORLD
    if default is None or default.size() == 1:
        return compute()
    held, first = None if _is_distributed(loss) else world.process_group, next_node()
    with unpacking_in(default), _alone(default, held, name):
        value = compute()
    # a checkpoint around the call sends messages of its own in the backward pass
    held = None if saved_tensors_are_hooked() else held
    for node in _python_functions(value, first):
        # the node in it would be a reference cycle, in which the embeddings stay in memory
        node.apply = partial(_backward, ref(node), default, held, name)
    return value


@uncompiled
def _backward(
    node: Callable[[], Any], default: dist.ProcessGroup, held: dist.ProcessGroup | None, name: str, *gradients: Any
) -> Any:
    with _alone(default, held, name):
        return type(node()).apply(node(), *gradients)


@contextmanager
def _alone(default: dist.ProcessGroup, held: dist.ProcessGroup | None, name: str) -> Iterator[None]:
    """Context manager: this thread's default group is this process; messages by ``held`` are refused afterwards."""
    before = 0 if held is None else messages_of(held)

    def refuse() -> None:
        count = 0 if held is None else messages_of(held) - before
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
