"""A third-party loss sees one process: what it sends by itself, in its forward and its backward pass, goes to itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves

from contrastive_zoo.ranks import compat
from contrastive_zoo.ranks.compat import default_group, group_of_one, is_group, messages_of, next_node, run_backward_by

if dist.is_available() and not dist.is_initialized():
    # its functions hold the default group of the time at which it is imported, where the group cannot be replaced
    import torch.distributed.nn.functional  # noqa: F401 - imported for its defaults

R = TypeVar("R")

_NAME = "one process"
_of_one: list[dist.ProcessGroup] = []
"""The group of this process alone; torch forgets it with all others when the default group is shut down."""


@dataclass(frozen=True)
class OneProcess:
    """Runs code of ``name``, which every rank computes alike, where torch.distributed consists of this process.

    ``torch.distributed.get_world_size()`` is 1 in it, and collectives of the default group are those of one process.
    Outside of it, torch.distributed is as it was.
    """

    name: str
    """Of the loss or the miner, the first word of the error."""
    group: dist.ProcessGroup | None = None
    """The ranks that compute alike; None is the default group."""
    loss: Any = None
    """What runs, if it is a module; in DDP or FSDP it may send what they need."""
    refuses: bool = True
    """Whether messages by a process group that it holds are refused."""

    def run(self, compute: Callable[[], R]) -> R:
        """What ``compute()`` returns, the loss of all ranks' rows. Its autograd functions see one process in backward, too.

        Raises:
            ValueError: on every rank alike, it has sent messages by a process group that it holds.
        """
        if _is_alone():
            return compute()
        began = next_node()
        in_ddp = isinstance(self.loss, nn.parallel.DistributedDataParallel)
        if in_ddp:  # it sends buffers before it calls the loss
            with self._within(self.loss.module):
                value = compute()
        else:
            with self.entered():
                value = compute()
        nodes = [*_python_functions(value, began)]
        if nodes:
            # what gathers or reduces parameters has functions of its own; the loss, which may hold the graph, is not held
            alone = replace(self, loss=None, refuses=not in_ddp and not _is_split(self.loss))
            for node in nodes:
                run_backward_by(node, partial(_in_one_process, alone))
        return value

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within it torch.distributed consists of this process."""
        if _is_alone():
            yield
            return
        groups = [x for x in {dist.group.WORLD, self.group} if x is not None]
        before, calls = [messages_of(x) for x in groups], compat.backward_calls
        if not (_of_one and is_group(_of_one[0])):
            _of_one[:] = [group_of_one(_NAME)]
        with default_group(_of_one[0], _NAME):
            yield
        count = sum(messages_of(x) for x in groups) - sum(before)
        if count and calls == compat.backward_calls and self.refuses and not _is_split(self.loss):
            raise ValueError(f"{self.name}: {_HOLDS_A_GROUP.format(count=count, s='s' * (count != 1))}")

    @contextmanager
    def _within(self, module: nn.Module) -> Iterator[None]:
        """Enter when a module is called, and leave when it returns."""
        entered: list[Any] = []

        def enter(*_: Any) -> None:
            entered.append(self.entered())
            entered[-1].__enter__()

        def leave(*_: Any) -> None:
            if entered:
                entered.pop().__exit__(None, None, None)

        handles = (
            module.register_forward_pre_hook(enter, prepend=True),
            module.register_forward_hook(leave, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _in_one_process(alone: OneProcess, backward: Callable[..., Any], ctx: Any, *gradients: Any) -> Any:
    with alone.entered():
        return backward(ctx, *gradients)


def _is_alone() -> bool:
    group = dist.group.WORLD if dist.is_available() else None
    return group is None or group.size() == 1


def _is_split(loss: Any) -> bool:
    """Whether the parameters of a loss are split over ranks, which gather them when it is called."""
    modules = loss.modules() if isinstance(loss, nn.Module) else ()
    return any(
        type(module).__name__ == "FullyShardedDataParallel"
        or any(hasattr(x, "device_mesh") for x in module.parameters())
        for module in modules
    )


def _python_functions(value: Any, began: int) -> Iterator[Any]:
    """The nodes in the graph of a value that belong to autograd functions in Python, of those made since ``began``.

    Older nodes are the encoder's, or of what a closure holds: these communicate between all ranks.
    """
    visited: set[Any] = {None}
    nodes: list[Any] = [x.grad_fn for x in tree_leaves(value) if isinstance(x, Tensor)]
    while nodes:
        node = nodes.pop()
        if node in visited or node._sequence_nr() < began:
            continue
        visited.add(node)
        if isinstance(node, BackwardCFunction):
            yield node
        nodes += [function for function, _ in node.next_functions]


_HOLDS_A_GROUP = (
    "it sends {count} message{s} by a process group that it holds, but every rank computes it from the rows of all ranks, "
    "which count W times then. Construct it without a process group, so that it takes the default group when it is called, "
    "or switch its gathering off. A default argument holds a group, too: import contrastive_zoo before init_process_group."
)
