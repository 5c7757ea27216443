"""Which rank compares which rows with which columns, and how columns come here and their gradients return to their owners.

A block of ranks is the local rows against the columns of one rank. With two towers every rank computes its block with
every other rank. With one tower S = Sᵀ, so one of the two ranks of a pair computes their block: rank r takes those of
the ⌊W/2⌋ ranks ahead of it, a half ring. With an even W the opposite rank is ahead of both, and each takes half a block.

Columns are gathered, or pass from rank to rank in a ring. The local block comes first, so that the transfer of the other
ranks' columns overlaps its computation.

With M machines of L ranks there are two rings: inside a machine, and between machines. Rank l of machine m first compares
its rows with the columns of its own machine. Meanwhile it receives the columns of rank l of machine m + 1, and then passes
them on inside its machine, and so on. So each column is sent to a machine once, and not once for each of its ranks. The
gradients of a visiting machine's columns are added up inside the machine, and then sent to their owners, once for each
machine. With one tower, one of the two machines of a pair compares its rows with the columns of the other, half of the
machines being ahead of it. One machine of W ranks is a plain ring.

A rank holds four shards of columns at a time: its own, the one that it passes on, and those that arrive by either link.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from contrastive_zoo.engine.precision import inverse_norms
from contrastive_zoo.ranks.session import Session
from contrastive_zoo.ranks.transport import exchange_rows, reduce_scatter_rows, scatters_sums, start_gather
from contrastive_zoo.ranks.world import Machines, Shards, World


@dataclass(frozen=True)
class RankBlock:
    """The local ``rows`` against ``columns`` of the rank ``ahead``, as those of ``behind`` against the local ``sent``."""

    ahead: int
    rows: slice
    columns: slice
    behind: int
    sent: slice


def schedule(rows: Shards, columns: Shards, layout: Machines, *, half: bool) -> list[list[RankBlock]]:
    """Return the blocks that this rank computes by the machine whose columns they have, its own machine and block first.

    ``layout`` are the ranks of each machine. ``half`` says whether rows and columns are the same, so that one rank of a
    pair computes their block.
    """
    machine, place = position(rows.rank, layout)

    def relative(j: int, i: int) -> int:
        """Return the rank j machines and i places ahead."""
        ranks = layout[(machine + j) % len(layout)]
        return ranks[(place + i) % len(ranks)]

    def block(j: int, i: int) -> RankBlock:
        ahead, behind = relative(j, i), relative(-j, -i)
        local_rows, visiting = slice(0, rows.size), slice(0, columns.sizes[ahead])
        sent = slice(0, columns.size)
        index, ring_size, steps = (machine, len(layout), j) if j else (place, len(layout[0]), i)
        if half and 2 * steps == ring_size:  # each is ahead of the other: they share the rows of the first one
            if 2 * index < ring_size:
                local_rows, sent = slice(0, rows.size // 2), slice(rows.size // 2, columns.size)
            else:
                visiting = slice(rows.sizes[ahead] // 2, visiting.stop)
        return RankBlock(ahead, local_rows, visiting, behind, sent)

    machines, places = (len(x) // 2 + 1 if half else len(x) for x in (layout, layout[0]))
    return [[block(j, i) for i in range(len(layout[0]) if j else places)] for j in range(machines)]


def position(rank: int, layout: Machines) -> tuple[int, int]:
    """Return the machine of a rank, and its place there."""
    return next((m, ranks.index(rank)) for m, ranks in enumerate(layout) if rank in ranks)


class GatherExchange:
    """Gather the columns of all ranks in one message, which starts at once; return their gradients in one message."""

    def __init__(
        self,
        columns: Tensor,
        blocks: Sequence[RankBlock],
        shards: Shards,
        world: World,
        sent: Tensor | None = None,
        gathered: Tensor | None = None,
    ) -> None:
        self.columns, self.blocks, self.shards, self.world, self.gathered = columns, blocks, shards, world, gathered
        if gathered is None:
            self.wait = start_gather(columns if sent is None else sent, shards, world)

    def __iter__(self) -> Iterator[Tensor]:
        yield self.columns
        if self.gathered is None:
            self.gathered = self.wait()
        by_rank = self.gathered.split(self.shards.sizes)
        for block in self.blocks[1:]:
            yield by_rank[block.ahead][block.columns].to(self.columns.dtype)

    def windows(self, prepare: Callable[[Tensor], Tensor]) -> Iterator[tuple[Sequence[RankBlock], Tensor]]:
        """Yield all blocks, and their columns as one matrix of what ``prepare`` makes of the columns of each."""
        columns = [prepare(x) for x in self]
        yield self.blocks, columns[0] if len(columns) == 1 else torch.cat(columns)

    def return_gradients(self, total: Tensor, parts: Iterable[Tensor]) -> Tensor:
        """Add the other ranks' gradients of the local columns to ``total``; send ``parts``, those of other columns."""
        # where shards are even, all ranks take all columns of every other, or none does
        whole = slice(0, self.shards.size)
        takes_all = len(self.blocks) == self.world.size and all(x.columns == x.sent == whole for x in self.blocks)
        if not (scatters_sums(self.shards, self.world) and takes_all):
            return merge_at_owners(total, parts, self.blocks[1:], self.world)
        gradients = total.new_empty(self.shards.total, *total.shape[1:])
        by_rank = gradients.split(self.shards.sizes)
        for block, part in zip(self.blocks[1:], parts, strict=True):
            by_rank[block.ahead].copy_(part)
        gradients[self.shards.local] = total
        return total.copy_(reduce_scatter_rows(gradients, self.shards, self.world))


class SendReceive:
    """Start to send rows to one rank and to receive rows from another; in place of no rows, one of zeros.

    Every rank sends: NCCL demands it of the first transfers of a group.
    """

    def __init__(self, rows: Tensor, to: int, count: int, source: int, world: World) -> None:
        self.sent = rows.contiguous() if len(rows) else rows.new_zeros(1, *rows.shape[1:])
        self.received, self.count = rows.new_empty(max(1, count), *rows.shape[1:]), count
        messages = [
            dist.P2POp(dist.isend, self.sent, group=world.group, group_peer=to),
            dist.P2POp(dist.irecv, self.received, group=world.group, group_peer=source),
        ]
        begin = partial(dist.batch_isend_irecv, messages)
        self.arrived = world.start("a transfer to the next rank of the ring", begin, polled=False)

    def wait(self) -> Tensor:
        self.arrived()
        return self.received[: self.count]


def add_up(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors, added one after the other."""
    return reduce(torch.add, parts)


def merge_at_owners(
    total: Tensor,
    parts: Iterable[Tensor],
    blocks: Sequence[RankBlock],
    world: World,
    merge: Callable[[Sequence[Tensor]], Tensor] = add_up,
) -> Tensor:
    """Merge into ``total`` what other ranks computed for the local columns; send ``parts``, computed for theirs.

    ``merge`` gets all parts of the same columns at once.
    """
    send, receive = [0] * world.size, [0] * world.size
    for block in blocks:
        send[block.ahead], receive[block.behind] = _length(block.columns), _length(block.sent)
    outgoing = total.new_empty(sum(send), *total.shape[1:])
    by_owner = outgoing.split(send)
    for block, part in zip(blocks, parts, strict=True):  # one part is held at a time, if they come one by one
        by_owner[block.ahead].copy_(part)
    if world.size == 1:
        return total
    received = exchange_rows(outgoing, send, receive, world).split(receive)
    for sent, parts_of in groupby(sorted(blocks, key=lambda x: (x.sent.start, x.sent.stop)), lambda x: x.sent):
        behind = sorted(block.behind for block in parts_of)
        total[sent] = merge([total[sent], *(received[rank] for rank in behind)])
    return total


class Ring:
    """Bring other ranks' columns here in turn, after the local ones, and return their gradients, in their dtype."""

    gathered = None

    def __init__(
        self,
        columns: Tensor,
        by_machine: Sequence[Sequence[RankBlock]],
        layout: Machines,
        world: World,
        sent: Tensor | None = None,
    ) -> None:
        self.columns, self.by_machine, self.world = columns, by_machine, world
        self.blocks = [block for blocks in by_machine for block in blocks]
        self.message = columns if sent is None else sent
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

    def windows(self, prepare: Callable[[Tensor], Tensor]) -> Iterator[tuple[Sequence[RankBlock], Tensor]]:
        """Yield each block, and what ``prepare`` makes of its columns."""
        for block, columns in zip(self.blocks, self, strict=True):
            yield [block], prepare(columns)

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


_Arriving = tuple[Tensor, SendReceive]  # what arriving gradients are added to, and these


def _add(pending: _Arriving | None) -> None:
    if pending is not None:
        target, transfer = pending
        target += transfer.wait()


def _length(x: slice) -> int:
    return x.stop - x.start


def lengths(blocks: Sequence[RankBlock]) -> list[int]:
    """Return the numbers of columns of blocks."""
    return [_length(block.columns) for block in blocks]


@dataclass(frozen=True)
class Operand:
    """Rows as products take them, and by what products are multiplied to be those of unit rows; None if they are."""

    rows: Tensor
    inverse: Tensor | None

    def __getitem__(self, part: slice) -> "Operand":
        return Operand(self.rows[part], None if self.inverse is None else self.inverse[part])

    def normalize(self, products: Tensor, others: "Operand") -> Tensor:
        """Make of the products of factors those of unit rows, in place."""
        if self.inverse is not None and others.inverse is not None:
            products.mul_(self.inverse[:, None]).mul_(others.inverse)
        return products


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Compare local rows with the columns of all ranks, in the order in which these arrive."""

    row_shards: Shards
    column_shards: Shards
    world: World
    unit_norm: bool  # whether rows and columns have norms of at most 1
    factors: tuple[Tensor, Tensor] | None
    """Of an input of 16 bits, what is sent and multiplied in place of rows and columns; None of others."""
    one_tower: bool = False  # whether rows and columns are the same, so that one rank of a pair computes their block
    learns: bool = field(default_factory=torch.is_grad_enabled)  # a leaf has requires_grad under no_grad, too

    @property
    def dtype(self) -> torch.dtype | None:
        return None if self.factors is None else self.factors[0].dtype

    @property
    def normalizes(self) -> bool:
        """Whether products of factors are divided by their norms."""
        return self.unit_norm and self.factors is not None

    def row_factors(self, rows: Tensor) -> Tensor:
        return rows if self.factors is None else self.factors[0].detach().to(rows.dtype)

    def operand(self, rows: Tensor) -> Any:
        """Return factors as products take them."""
        return Operand(rows, inverse_norms(rows) if self.normalizes else None)

    def exchange(self, columns: Tensor, gathered: Tensor | None = None) -> GatherExchange | Ring:
        """Start to bring the factors of other ranks' columns here, unless an earlier exchange has gathered them."""
        sent = None if self.factors is None else self.factors[1]
        shards = self.row_shards, self.column_shards
        return start_exchange(columns, *shards, self.world, sent, half=self.one_tower, gathered=gathered)


def start_exchange(
    columns: Tensor,
    row_shards: Shards,
    shards: Shards,
    world: World,
    sent: Tensor | None = None,
    *,
    half: bool = False,
    gathered: Tensor | None = None,
) -> GatherExchange | Ring:
    """Start to bring other ranks' columns, or what is ``sent`` in place of them, here: in the session's ring, or at once."""
    ring = world.ring if isinstance(world, Session) and world.size > 1 else ()
    one_machine = (tuple(range(len(shards.sizes))),)
    layout = one_machine if ring is True else ring or ()
    by_machine = schedule(row_shards, shards, layout or one_machine, half=half)
    columns = columns if sent is None else sent.detach().to(columns.dtype)
    if layout:
        return Ring(columns, by_machine, layout, world, sent)
    return GatherExchange(columns, by_machine[0], shards, world, sent, gathered)
