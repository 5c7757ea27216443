"""Pass the columns of every rank by every other rank, in one ring or in two: inside a machine, and between machines.

With M machines of L ranks, rank l of machine m first compares its rows with the columns of its own machine. Meanwhile it
receives the columns of rank l of machine m + 1, and then passes them on inside its machine, and so on. So each column is
sent to a machine once, and not once for each of its ranks. The gradients of a visiting machine's columns are added up
inside the machine, and then sent to their owners, once for each machine. One machine of W ranks is a plain ring.

A rank holds four shards of columns at a time: its own, the one that it passes on, and those that arrive by either link.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from contrastive_zoo.engine.exchange import GatherExchange, SendReceive, wire_rows
from contrastive_zoo.engine.schedule import RankBlock, schedule
from contrastive_zoo.session import Session
from contrastive_zoo.world import Machines, Shards, World


def machines(world: World) -> Machines:
    """Return the ranks of each machine that the session's ring has, () without a ring.

    Examples:
        >>> machines(World())
        ()
    """
    ring = world.options.ring if isinstance(world, Session) else ()
    return (tuple(range(world.size)),) if ring is True else ring or ()


def ring_blocks(columns: Shards, layout: Machines, rows: int = 0) -> list[RankBlock]:
    """Return the blocks of all local rows and each rank's columns, in the order in which a ring brings them.

    Args:
        columns: shard sizes of the columns.
        layout: the ranks of each machine.
        rows: number of local rows.

    Examples:
        >>> [block.ahead for block in ring_blocks(Shards((1,) * 4, rank=1), ((0, 1), (2, 3)))]
        [1, 0, 3, 2]
    """
    machine, place = position(columns.rank, layout)
    blocks = []
    for j in range(len(layout)):
        for i in range(len(layout[0])):
            ahead, behind = (layout[(machine + s * j) % len(layout)][(place + s * i) % len(layout[0])] for s in (1, -1))
            visiting, local = slice(0, columns.sizes[ahead]), slice(0, columns.size)
            blocks.append(RankBlock(ahead, slice(0, rows), visiting, behind, local))
    return blocks


def position(rank: int, layout: Machines) -> tuple[int, int]:
    """Return the machine of a rank, and its place there.

    Examples:
        >>> position(2, ((0, 1), (2, 3)))
        (1, 0)
    """
    return next((m, ranks.index(rank)) for m, ranks in enumerate(layout) if rank in ranks)


class Ring:
    """Bring each rank's columns here in turn, the local ones first, and return their gradients to their owners.

    Args:
        columns: the local columns.
        shards: shard sizes of the columns.
        layout: the ranks of each machine.
        world: the ranks.
        dtype: the dtype of the messages, if it has 16 bits; gradients keep the dtype of the columns.
    """

    gathered = None

    def __init__(
        self, columns: Tensor, shards: Shards, layout: Machines, world: World, dtype: torch.dtype | None = None
    ) -> None:
        self.columns, self.shards, self.layout, self.world = columns, shards, layout, world
        self.blocks = ring_blocks(shards, layout)
        self.message = wire_rows(columns, dtype, world)
        self.machine, self.place = position(world.rank, layout)

    def _rank(self, machines_ahead: int, places_ahead: int) -> int:
        ranks = self.layout[(self.machine + machines_ahead) % len(self.layout)]
        return ranks[(self.place + places_ahead) % len(ranks)]

    def _send_receive(self, rows: Tensor, to: tuple[int, int], source: tuple[int, int], owner: int) -> SendReceive:
        """Start to send rows to one place and to receive as many rows from another as ``owner`` has."""
        return SendReceive(rows, self._rank(*to), self.shards.sizes[owner], self._rank(*source), self.world)

    def __iter__(self) -> Iterator[Tensor]:
        relayed, places = self.message, len(self.layout[0])
        for j in range(len(self.layout)):
            next_machine = None
            if j + 1 < len(self.layout):
                sides = (-j - 1, 0), (j + 1, 0)
                next_machine = self._send_receive(self.message, *sides, self._rank(j + 1, 0))
            visiting = relayed
            for i in range(places):
                arriving = None
                if i + 1 < places:
                    sides = (0, -i - 1), (0, i + 1)
                    arriving = self._send_receive(relayed, *sides, self._rank(j, i + 1))
                yield self.columns if i == j == 0 else visiting.to(self.columns.dtype)
                visiting = visiting if arriving is None else arriving.wait()
            relayed = relayed if next_machine is None else next_machine.wait()

    def return_gradients(self, total: Tensor, parts: Iterable[Tensor]) -> Tensor:
        """Add the other ranks' gradients of the local columns to ``total``; send ``parts``, those of other columns."""
        by_block, places = iter(parts), len(self.layout[0])
        leaving: SendReceive | None = None
        for j in range(len(self.layout)):
            relayed = total if j == 0 else next(by_block)
            arriving: SendReceive | None = None
            for i in range(1, places):
                transfer = self._send_receive(next(by_block), (0, i), (0, -i), self._rank(j, 0))
                if arriving is not None:
                    relayed += arriving.wait()
                arriving = transfer
            if arriving is not None:
                relayed += arriving.wait()
            if leaving is not None:
                total += leaving.wait()
            leaving = None if j == 0 else self._send_receive(relayed, (j, 0), (-j, 0), self.world.rank)
        if leaving is not None:
            total += leaving.wait()
        for _ in by_block:  # a generator that computes the local block only
            raise AssertionError("more blocks than ranks")
        return total


def start_exchange(
    columns: Tensor, shards: Shards, world: World, dtype: torch.dtype | None = None
) -> GatherExchange | Ring:
    """Start to bring all other ranks' columns here, in the ring of the session, or all at once.

    Examples:
        >>> [x.tolist() for x in start_exchange(torch.ones(1, 2), Shards((1,)), World())]
        [[[1.0, 1.0]]]
    """
    layout: Sequence[Sequence[int]] = machines(world) if world.size > 1 else ()
    if layout:
        return Ring(columns, shards, machines(world), world, dtype)
    return GatherExchange(columns, schedule(shards, shards, half=False), shards, world, dtype)
