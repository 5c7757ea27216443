"""The real code of one rank of many, on torch's fake process group: messages, bytes and peak memory of a step.

python benchmarks/one_rank.py [--ranks 8 64 512 4096] [--rows 128] [--docs]

The fake group sends nothing: every rank seems to send what this one does. The headers of a handshake then get other ranks'
numbers of rows, some of them zero, and other fingerprints. Values and gradients mean nothing; what a rank sends and holds
depends on sizes only. --docs writes the table of docs/pages/scaling.md.
"""

import random
import weakref
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from suite.harness import in_new_process, program, progress
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import contrastive_zoo as cz
from contrastive_zoo.ranks import handshake
from contrastive_zoo.ranks.doubling import Doubling
from contrastive_zoo.ranks.world import FIELDS, NUMBERS, World, exchange_headers
from contrastive_zoo.wrapper.step import splitting
from tools.pages import table

WIDTH, MACHINE, FLOAT = 64, 4, 4
HEADER = 8 * (len(FIELDS) + NUMBERS)
TRANSFER = "a transfer to the next rank of the ring"
SMALL = 2**10  # rows of a small batch on all ranks, at most
PATHS = ("gathered", "ring", "two-level ring", "small batch", "GradCache", "third-party loss")


class Step(NamedTuple):
    """What a rank sends and holds in a step, forward and backward."""

    collectives: int
    transfers: int
    sent: int
    held: float


# ---------------------------------------------------------------------------------------------------------- the formulas


def expected(path: str, sizes: Sequence[int]) -> Step:
    """Return the formulas of docs/pages/scaling.md for CLIP, or a third-party loss of one tower, on rank W // 3.

    What is held is without what is small; all else is exact.
    """
    ranks, rank = len(sizes), len(sizes) // 3
    n, m, total, row = sizes[rank], max(sizes), sum(sizes), FLOAT * WIDTH
    others = ranks - 1
    if path == "small batch":
        return Step(1, 0, others * (HEADER + 2 * m * row), 6 * FLOAT * total**2 + 3 * ranks * HEADER)
    if path == "third-party loss":
        return Step(2, 0, others * (HEADER + m * row), 2 * ranks * (HEADER + m * row))
    statistics = others * (2 * HEADER + 8 * m + 24) + FLOAT * (total - n)
    logits = FLOAT * n * total
    if path in ("ring", "two-level ring"):
        machine = MACHINE if path == "two-level ring" else ranks
        # what this rank brings along
        passed = [sizes[(rank + machine * j) % ranks] for j in range(1, ranks // machine)]
        sent = (ranks // machine - 1) * n + (machine - 1) * (n + sum(map(_at_least_one, passed)))
        returned = sum(_at_least_one(size) for r, size in enumerate(sizes) if r != rank)
        transfers = row * (2 * sent + returned)
        return Step(7, 3 * others, statistics + transfers, logits + 11 * n * row + 8 * (ranks * m + 2 * total))
    held = logits + row * ((total - n) + total + others * n)
    sent = statistics + row * (others * m + total - n)
    if path == "gathered":
        return Step(9, 0, sent, held)
    chunks = others * (HEADER + 2 * (8 + CHUNK)) if 0 in sizes else others * HEADER
    return Step(14 if 0 in sizes else 10, 0, sent + chunks, held)


CHUNK = 315
"""Bytes of the text that tells ranks without samples what a chunk of this encoder is."""


def _at_least_one(rows: int) -> int:
    """Return the rows of a transfer: one in place of none."""
    return max(1, rows)


# ------------------------------------------------------------------------------------------------------------- the rank


class OneRank(TorchDispatchMode):
    """Records what this rank sends and holds, and makes up what other ranks with so many rows send."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.sizes, self.rank = sizes, dist.get_rank()
        self.messages: list[str] = []  # as errors name them
        self.sent = self.held = self.peak = 0  # bytes
        self._storages: set[int] = set()
        self._last_sent: Any = np.empty(0)
        self._patches = ExitStack()

    def __enter__(self) -> "OneRank":
        start = World.start

        def recorded(world: World, message: str, *args: Any, **named: Any) -> Any:
            self.messages.append(message)
            return start(world, message, *args, **named)

        in_this_thread: Any = {"start": Doubling.run, "join": lambda *_: None}
        self._patches.enter_context(patch.multiple(Doubling, **in_this_thread))
        self._patches.enter_context(patch.object(World, "start", recorded))
        self._patches.enter_context(patch.object(handshake, "exchange_headers", self._exchange_headers))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def _exchange_headers(self, *args: Any) -> Any:
        headers, payload = exchange_headers(*args)
        return [self._of_rank(rank, header) for rank, header in enumerate(headers)], payload

    def _of_rank(self, rank: int, header: Sequence[int]) -> tuple[int, ...]:
        """Return a header with that rank's sizes, which are multiples of its number of samples, and with other digests."""
        fields, numbers = header[: len(FIELDS)], header[len(FIELDS) :]
        return (*fields, *(x * self.sizes[rank] // self.sizes[self.rank] for x in numbers))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function.namespace == "c10d":
            self._note(function._opname, *args)
        for x in tree_leaves(found):
            if isinstance(x, Tensor):
                self._hold(x.untyped_storage())
        return found

    def _note(self, name: str, *args: Any) -> None:
        others = len(self.sizes) - 1
        if name == "send":
            self._last_sent = args[0][0].numpy().copy()
            self.sent += args[0][0].nbytes
        elif name == "recv_":
            received = args[0][0].numpy()  # no tensor that would count as memory
            received[...] = np.resize(self._last_sent, received.shape)
        elif name == "_allgather_base_":
            self.sent += args[1].nbytes * others
        elif name == "alltoall_base_" and args[4]:
            self.sent += args[1].nbytes - args[4][self.rank] * args[1][:1].nbytes
            args[0].zero_()
        elif name == "alltoall_base_":
            self.sent += args[1].nbytes // len(self.sizes) * others
        else:
            assert name == "broadcast_", name  # from rank 0

    def _hold(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._storages:
            self._storages.add(storage._cdata)
            self.held += storage.nbytes()
            self.peak = max(self.peak, self.held)
            weakref.finalize(storage, self._release, storage._cdata, storage.nbytes())

    def _release(self, address: int, size: int) -> None:
        self._storages.discard(address)
        self.held -= size


# ------------------------------------------------------------------------------------------------------------- the paths


def variance(z: Tensor) -> Tensor:
    """A third-party loss whose memory is linear in the rows."""
    return z.var(0).sum()


def made(path: str, ranks: int, machine: int, group: Any = None) -> cz.DistributedLoss:
    ring: Any = {"ring": True, "two-level ring": torch.arange(ranks).view(-1, machine)}.get(path, False)
    return cz.DistributedLoss(variance if path == "third-party loss" else cz.Clip(), ring=ring, process_group=group)


def run(path: str, loss: cz.DistributedLoss, encoder: nn.Module, rows: int, group: Any = None) -> None:
    """Run a step of a path, forward and backward, with so many rows on this rank."""
    towers = [
        torch.randn(rows, encoder.in_features, requires_grad=True) for _ in range(1 + (path != "third-party loss"))
    ]
    with splitting(always=path != "small batch"):
        if path == "GradCache":
            chunks = [x.detach().split(max(1, rows // 2)) for x in towers]
            cz.cached_step([encoder] * 2, chunks, loss, process_group=group)
        else:
            loss(*towers).backward()


def split_of(ranks: int, rows: int) -> list[int]:
    """Return uneven shards: of rank W // 3 the largest, of a quarter of the others none."""
    draw = random.Random(ranks)
    sizes = [draw.choice([0, rows // 4, rows // 2, rows]) for _ in range(ranks)]
    sizes[ranks // 3] = rows
    return sizes


def counted(path: str, sizes: Sequence[int]) -> Step:
    """Return what a step of a path takes, in a process without a group."""
    dist.init_process_group("fake", store=FakeStore(), rank=len(sizes) // 3, world_size=len(sizes))
    try:
        loss, encoder = made(path, len(sizes), MACHINE), nn.Linear(WIDTH, WIDTH)
        # from the third step on a payload of rows follows the header
        for _ in range(3 if path in ("small batch", "third-party loss") else 1):
            with OneRank(sizes) as found:
                run(path, loss, encoder, sizes[dist.get_rank()])
        transfers = found.messages.count(TRANSFER)
        return Step(len(found.messages) - transfers, transfers, found.sent, found.peak)
    finally:
        dist.destroy_process_group()


def on_one_thread(path: str, sizes: Sequence[int]) -> Step:
    torch.set_num_threads(1)
    return counted(path, sizes)


def main(given: Namespace) -> dict[str, str]:
    lines = []
    for path in PATHS:
        for ranks in given.ranks:
            sizes = split_of(ranks, given.rows)
            if path == "small batch":  # every second rank has none
                few = split_of(ranks, max(1, SMALL // ranks))
                sizes = [x * ((rank - ranks // 3) % 2 == 0) for rank, x in enumerate(few)]
            found, formula = in_new_process(on_one_thread, path, sizes), expected(path, sizes)
            assert found[:3] == formula[:3], (path, ranks, found, formula)
            numbers = [f"{x:,}" for x in (ranks, sum(sizes), *found[:2])]
            bytes_held = [f"{found.sent / 1e6:,.3g}", f"{found.held / 1e6:,.3g}", f"{found.held / formula.held:.2f}"]
            lines.append([path, *numbers, *bytes_held])
            progress(*lines[-1])
    head = ["path", "ranks W", "rows N", "collectives", "transfers", "MB sent", "MB held", "held, formula = 1"]
    return {"counted": table(head, lines)}


if __name__ == "__main__":
    program(main, __doc__, page="scaling.md", ranks=[8, 64, 512, 4096], rows=128)
