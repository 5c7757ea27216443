"""The real code of one rank of many, in this process: the messages, bytes, multiplications and memory of a step.

torch's fake process group sends nothing: every rank seems to send what this one does. Headers of a handshake get the other
ranks' numbers of samples. Values and gradients mean nothing; what a rank sends and holds depends on sizes only.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from contrastive_zoo.ranks import handshake
from contrastive_zoo.ranks.compat import backward_pass
from contrastive_zoo.ranks.world import FIELDS, World, exchange_headers


class Step(NamedTuple):
    """What a rank sends, multiplies and holds in a step, forward and backward."""

    messages: int
    backward_messages: int
    bytes_sent: int
    matmul_flop: int
    peak_bytes: int


def counted(loss: Any, args: Sequence[Tensor], sizes: Sequence[int], rank: int, *, steps: int = 1) -> Step:
    """Return what the last of some steps takes, a call and its backward pass; memory is counted beside the arguments."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=len(sizes))
    one, start = OneRank(sizes), World.start

    def recorded(world: World, message: str, *args: Any, **named: Any) -> Any:
        if world.size > 1:
            one.messages.append((message, backward_pass() != -1))
        return start(world, message, *args, **named)

    try:
        with patch.object(World, "start", recorded), patch.object(handshake, "exchange_headers", one.exchange_headers):
            for _ in range(steps):
                one.reset(args)
                with one:
                    loss(*args).sum().backward()
    finally:
        dist.destroy_process_group()
    backward = sum(is_backward for _, is_backward in one.messages)
    return Step(len(one.messages), backward, one.sent, one.flop, one.peak)


_MATMULS = {"mm", "addmm", "bmm", "baddbmm"}


class OneRank(TorchDispatchMode):
    """Records what this rank sends, multiplies and holds, and makes up what other ranks with so many samples send."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.sizes, self.rank = sizes, dist.get_rank()
        self._last_sent: Any = np.empty(0)
        self.reset(())

    def reset(self, known: Iterable[Tensor]) -> None:
        """Begin to count anew, without tensors that are known."""
        for x in known:
            x.grad = None
        self._storages = {x.untyped_storage()._cdata for x in known}
        self.messages: list[tuple[str, bool]] = []  # as errors name them, and whether in a backward pass
        self.sent = self.held = self.peak = self.flop = 0

    def exchange_headers(self, *args: Any) -> Any:
        headers, payload = exchange_headers(*args)
        return [self._of_rank(rank, header) for rank, header in enumerate(headers)], payload

    def _of_rank(self, rank: int, header: Sequence[int]) -> tuple[int, ...]:
        """Return a header with that rank's sizes, which are multiples of its number of samples, and with other digests."""
        fields, numbers = header[: len(FIELDS)], header[len(FIELDS) :]
        return (*fields, *(x * self.sizes[rank] // max(1, self.sizes[self.rank]) for x in numbers))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        name = function._opname
        if function.namespace == "c10d":
            self._note(name, *args)
        elif name.rstrip("_") in _MATMULS:
            first = args[-2]
            self.flop += 2 * first.numel() * args[-1].shape[-1]
        for x in tree_leaves(found):
            if isinstance(x, Tensor) and not x.is_sparse:
                self._hold(x.untyped_storage())
        return found

    def _note(self, name: str, *args: Any) -> None:
        others = len(self.sizes) - 1
        if name == "send":
            self._last_sent = args[0][0].view(torch.uint8).numpy().copy()
            self.sent += args[0][0].nbytes
        elif name == "recv_":
            received = args[0][0].view(torch.uint8).numpy()  # no tensor that would count as memory
            received[...] = np.resize(self._last_sent, received.shape)
        elif name == "_allgather_base_":
            self.sent += args[1].nbytes * others
        elif name == "alltoall_base_" and args[4]:
            self.sent += args[1].nbytes - args[4][self.rank] * args[1][:1].nbytes
            args[0].zero_()
        elif name == "alltoall_base_":
            self.sent += args[1].nbytes // len(self.sizes) * others
        elif name == "allreduce_":
            self.sent += 2 * sum(x.nbytes for x in args[0]) * others // len(self.sizes)
        else:  # rank 0 sends it along a tree
            assert name == "broadcast_", name
            self.sent += args[0][0].nbytes * others.bit_length() * (self.rank == 0)

    def _hold(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._storages:
            self._storages.add(storage._cdata)
            self.held += storage.nbytes()
            self.peak = max(self.peak, self.held)
            weakref.finalize(storage, self._release, storage._cdata, storage.nbytes())

    def _release(self, address: int, size: int) -> None:
        if address in self._storages:
            self._storages.discard(address)
            self.held -= size
