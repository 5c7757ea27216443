"""The process group of a thread: torch's, with messages from rank to rank, and waits in which other ranks run."""

from __future__ import annotations

import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from contrastive_zoo.testing.messages import Message, message_of

try:
    from torch.testing._internal.distributed import multi_threaded_pg as threaded
except ImportError:
    raise ValueError(
        f"Worlds(threads=True) needs torch.testing._internal.distributed.multi_threaded_pg, which torch {torch.__version__} "
        "lacks. Leave out threads=True: ranks are processes then."
    ) from None

Work: Any = dist.Work


class Collective:
    """One call of a collective on all ranks, which writes their tensors when all have come."""

    def __init__(self, compute: Any, size: int) -> None:
        self.compute, self.size, self.is_done, self.error = compute, size, False, ""
        self.data: dict[int, tuple[Message, Any]] = {}

    def arrived(self) -> bool:
        if len(self.data) == self.size and not self.is_done:
            self.is_done = True
            sent, data = zip(*(self.data[rank] for rank in range(self.size)), strict=True)
            try:
                if len({*sent}) > 1:
                    raise ValueError(f"ranks send unequal messages: {'; '.join(map(str, sent))}")
                with torch.inference_mode():  # in which tensors of any mode are written
                    self.compute.work(data)
            except Exception as error:
                self.error = str(error)
        return self.is_done


class Letter:
    """A tensor from another rank."""

    error = ""

    def __init__(self, box: deque[Tensor], received: Tensor) -> None:
        self.box, self.received, self.is_done = box, received, False

    def arrived(self) -> bool:
        if self.box and not self.is_done:
            self.is_done = True
            with torch.inference_mode():
                self.received.copy_(self.box.popleft())
        return self.is_done


class Waiting(Work):
    """A message that was begun, as ``torch.distributed`` returns it."""

    def __init__(self, member: Any, message: Collective | Letter) -> None:
        super().__init__()
        self.member, self.message = member, message

    def is_completed(self) -> bool:
        return self.message.is_done

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.message.is_done:
            self.member.wait(self.message.arrived, timeout.total_seconds() if timeout else math.inf)
        if not self.message.is_done or self.message.error:
            raise RuntimeError(self.message.error or "timed out")
        return True


class Exchange:
    """torch's AllToAllBase in W operations instead of W²."""

    def work(self, data: Sequence[tuple[Tensor, Tensor, Sequence[int], Sequence[int]]]) -> None:
        parts = [x.split(sizes) if len(sizes) else x.tensor_split(len(data)) for _, x, _, sizes in data]
        for rank, (received, *_) in enumerate(data):
            received.copy_(torch.cat([of_rank[rank] for of_rank in parts]))


class ThreadGroup(threaded.ProcessLocalGroup):
    """A process group of the thread that makes it; messages are in the tables of its rank's world."""

    def __init__(self, options: Any, _: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self.member: Any = threading.current_thread()
        self.title, self.begun = options.group_id, 0

    @property
    def group_name(self) -> Any:
        return self.title

    def _get_sequence_number_for_group(self) -> int:
        return self.begun

    def _get_backend(self, device: Any) -> Any:
        """Return this group: torch 2.14 asks its backend whether it joins messages to single ranks, which it does not."""
        return self

    def pause(self, seconds: float) -> None:
        self.member.wait(lambda: False, seconds)

    def join(self, compute: Any, rank: int, data: Any, name: str = "") -> Any:
        kind = name or type(compute).__name__
        sent = tree_leaves(data if isinstance(data, list) else data[kind != "Scatter"])
        has_splits = kind == "AllToAll"
        if kind == "AllToAllBase":
            compute, has_splits = Exchange(), bool(data[2] or data[3])
        message = message_of(kind.lower(), sent, uneven=has_splits)
        self.member.sent.append(message)
        self.begun += 1
        key, under_way = (self.title, self.begun, kind), self.member.world.collectives
        collective = Collective(compute, self.size())
        if self.size() > 1:  # groups of one rank share their name
            collective = under_way.setdefault(key, collective)
        collective.data[rank] = message, data
        if len(collective.data) == self.size():
            under_way.pop(key, None)
        return Waiting(self.member, collective)

    def barrier(self, opts: Any = None) -> Any:
        total = threaded.AllReduce(SimpleNamespace(op=dist.ReduceOp.SUM))
        return self.join(total, self.rank(), [torch.ones(1, dtype=torch.int64)], "Barrier")  # no all-reduce meets it

    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:  # type: ignore[override]  # as torch.distributed calls it
        return self.allreduce(tensors if self.rank() == opts.rootRank else [x.clone() for x in tensors], opts)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        self._box(self.rank(), to, tag).append(tensors[0].detach().clone())
        return Waiting(self.member, SimpleNamespace(is_done=True, error=""))  # type: ignore[arg-type]  # has arrived

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        return Waiting(self.member, Letter(self._box(source, self.rank(), tag), tensors[0]))

    def _box(self, source: int, to: int, tag: int) -> deque[Tensor]:
        box: deque[Tensor] = self.member.world.letters[self.title, source, to, tag]
        return box


BACKEND = "contrastive_zoo_threads"
dist.Backend.register_backend(BACKEND, ThreadGroup, extended_api=True, devices=["cpu", "cuda"])


@contextmanager
def threads_are_ranks() -> Iterator[None]:
    """Context manager: each thread has its own default group, and torch's groups of threads wait in turns."""
    c10d: Any = dist.distributed_c10d
    compiled: Any = torch._C._distributed_c10d
    isolate: Callable[[bool], None] = compiled._set_thread_isolation_mode
    # torch's methods join a collective by what this returns
    begin = staticmethod(lambda compute, group: SimpleNamespace(join=partial(group.join, compute)))
    world = patch.object(c10d, "_world", threaded.ThreadLocalWorld())
    hook = patch.object(sys, "excepthook", sys.excepthook)  # each group adds one
    with world, hook, patch.object(threaded.ProcessLocalGroup, "_start_coll", begin):
        isolate(True)
        try:
            yield
        finally:
            isolate(False)
