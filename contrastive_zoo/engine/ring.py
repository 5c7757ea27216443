"""Pass the columns of every rank by every other rank, in one ring or in two: inside a machine, and between machines.

With M machines of L ranks, rank l of machine m first compares its rows with the columns of its own machine. Meanwhile it
receives the columns of rank l of machine m + 1, and then passes them on inside its machine, and so on. So each column is
sent to a machine once, and not once for each of its ranks. The gradients of a visiting machine's columns are added up
inside the machine, and then sent to their owners, once for each machine. One machine of W ranks is a plain ring.

With one tower the columns go half of the way (:mod:`contrastive_zoo.engine.schedule`), inside machines and between them.

A rank holds four shards of columns at a time: its own, the one that it passes on, and those that arrive by either link.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from contrastive_zoo.engine.exchange import GatherExchange, SendReceive, wire_rows
from contrastive_zoo.engine.schedule import RankBlock, position, schedule, schedule_by_machine
from contrastive_zoo.ranks.session import Session
from contrastive_zoo.ranks.world import Machines, Shards, World


def machines(world: World) -> Machines:
    """Return the ranks of each machine that the session's ring has, () without a ring or other ranks."""
    ring = world.options.ring if isinstance(world, Session) and world.size > 1 else ()
    return (tuple(range(world.size)),) if ring is True else ring or ()


class Ring:
    """Bring other ranks' columns here in turn, after the local ones, and return their gradients to their owners.

    Arguments are those of :func:`start_exchange`; gradients keep the dtype of the columns.
    """

    gathered = None

    def __init__(
        self,
        columns: Tensor,
        by_machine: Sequence[Sequence[RankBlock]],
        layout: Machines,
        world: World,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.columns, self.by_machine, self.world = columns, by_machine, world
        self.blocks = [block for blocks in by_machine for block in blocks]
        self.message = wire_rows(columns, dtype, world)
        machine, place = position(world.rank, layout)
        ranks = layout[machine]
        self.neighbours = [(ranks[(place + i) % len(ranks)], ranks[place - i]) for i in range(len(ranks))]
        """For each step inside the machine, the rank so many places ahead, and the one as far behind."""

    def __iter__(self) -> Iterator[Tensor]:
        relayed = self.message
        for j, blocks in enumerate(self.by_machine):
            from_machine = None
            if j + 1 < len(self.by_machine):
                from_machine = self._fetch(self.message, self.by_machine[j + 1][0])
            visiting = relayed
            for i in range(len(blocks)):
                arriving = None
                if i + 1 < len(blocks) and j == 0:
                    arriving = self._fetch(self.message, blocks[i + 1])
                elif i + 1 < len(blocks):
                    ahead, behind = self.neighbours[i + 1]
                    arriving = SendReceive(relayed, behind, _length(blocks[i + 1].columns), ahead, self.world)
                yield self.columns if i == j == 0 else visiting.to(self.columns.dtype)
                visiting = visiting if arriving is None else arriving.wait()
            relayed = relayed if from_machine is None else from_machine.wait()

    def _fetch(self, rows: Tensor, block: RankBlock) -> SendReceive:
        """Start to receive the columns of a block from their owner, and to send the local ones to the rank behind."""
        return SendReceive(rows[block.sent], block.behind, _length(block.columns), block.ahead, self.world)

    def return_gradients(self, total: Tensor, parts: Iterable[Tensor]) -> Tensor:
        """Add the other ranks' gradients of the local columns to ``total``; send ``parts``, those of other columns."""
        by_block = iter(parts)
        leaving: _Arriving | None = None
        for j, blocks in enumerate(self.by_machine):
            merged = total if j == 0 else next(by_block)
            arriving: _Arriving | None = None
            for i, block in enumerate(blocks[1:], 1):
                target, (ahead, behind) = merged[block.sent] if j == 0 else merged, self.neighbours[i]
                transfer = SendReceive(next(by_block), ahead, len(target), behind, self.world)
                _add(arriving)  # which arrived while this part was computed
                arriving = target, transfer
            _add(arriving)
            _add(leaving)
            if j > 0:
                target = total[blocks[0].sent]
                leaving = target, SendReceive(merged, blocks[0].ahead, len(target), blocks[0].behind, self.world)
        _add(leaving)
        for _ in by_block:  # a generator that computes the local block only
            raise AssertionError("more blocks than ranks")
        return total


_Arriving = tuple[Tensor, SendReceive]
"""Gradients on their way here, and what they are added to."""


def _add(pending: _Arriving | None) -> None:
    if pending is not None:
        target, transfer = pending
        target += transfer.wait()


def _length(x: slice) -> int:
    return x.stop - x.start


def start_exchange(
    columns: Tensor,
    shards: Shards,
    world: World,
    dtype: torch.dtype | None = None,
    *,
    rows: Shards | None = None,
    half: bool = False,
    gathered: Tensor | None = None,
) -> GatherExchange | Ring:
    """Start to bring other ranks' columns here, in the ring of the session, or all at once.

    Args:
        columns: the local columns.
        shards: shard sizes of the columns.
        world: the ranks.
        dtype: the dtype of the messages, if it has 16 bits.
        rows: shard sizes of the rows that are compared with the columns, if they are other ones.
        half: whether rows and columns are the same, so that one rank of a pair computes their block.
        gathered: the columns of all ranks, if an earlier exchange gathered them.
    """
    if layout := machines(world):
        return Ring(columns, schedule_by_machine(rows or shards, shards, layout, half=half), layout, world, dtype)
    return GatherExchange(columns, schedule(rows or shards, shards, half=half), shards, world, dtype, gathered)
