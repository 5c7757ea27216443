"""Which rank compares which rows with which columns, and how columns come here and their gradients return to their owners.

With one tower S = Sᵀ, so a rank compares its rows with those of the ⌊W/2⌋ ranks ahead of it only, a half ring. With an even
W the opposite rank is ahead of both, and each takes half a block.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from contrastive_zoo.engine.precision import MIN_NORM, concatenated
from contrastive_zoo.ranks.session import Session
from contrastive_zoo.ranks.transport import exchange_rows, reduce_scatter_rows, scatters_sums, start_gather
from contrastive_zoo.ranks.world import Shards, World


@dataclass(frozen=True)
class RankBlock:
    """The local ``rows`` against ``columns`` of the rank ``ahead``, as those of ``behind`` against the local ``sent``."""

    ahead: int
    rows: slice
    columns: slice
    behind: int
    sent: slice


def schedule(rows: Shards, columns: Shards, *, half: bool) -> list[RankBlock]:
    """Return the blocks that this rank computes, its own first; ``half``: rows and columns are the same."""
    size, rank = len(rows.sizes), rows.rank

    def block(step: int) -> RankBlock:
        ahead, behind = (rank + step) % size, (rank - step) % size
        local_rows, visiting = slice(0, rows.size), slice(0, columns.sizes[ahead])
        sent = slice(0, columns.size)
        if half and 2 * step == size:  # each is ahead of the other: they share the rows of the first one
            if 2 * rank < size:
                local_rows, sent = slice(0, rows.size // 2), slice(rows.size // 2, columns.size)
            else:
                visiting = slice(rows.sizes[ahead] // 2, visiting.stop)
        return RankBlock(ahead, local_rows, visiting, behind, sent)

    return [block(step) for step in range(size // 2 + 1 if half else size)]


class GatherExchange:
    """Gather the columns of all ranks in one message, which has started; return their gradients in one message."""

    def __init__(
        self, columns: Tensor, blocks: Sequence[RankBlock], shards: Shards, world: World, wait: Callable[[], Tensor]
    ) -> None:
        self.columns, self.blocks, self.shards, self.world, self.wait = columns, blocks, shards, world, wait
        self.gathered: Tensor | None = None

    def __iter__(self) -> Iterator[Tensor]:
        yield self.columns
        if self.gathered is None:
            self.gathered = self.wait()
        by_rank = self.gathered.split(self.shards.sizes)
        for block in self.blocks[1:]:
            yield by_rank[block.ahead][block.columns].to(self.columns.dtype)

    def windows(self, dtype: torch.dtype) -> Iterator[tuple[Sequence[RankBlock], Tensor]]:
        """Yield all blocks, and their columns as one matrix of this dtype."""
        yield self.blocks, concatenated(*(x.to(dtype) for x in self))

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
    """Start to send rows to one rank and to receive rows from another. NCCL demands that every rank sends some."""

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


def merge_at_owners(
    total: Tensor,
    parts: Iterable[Tensor],
    blocks: Sequence[RankBlock],
    world: World,
    merge: Callable[[Sequence[Tensor]], Tensor] = lambda parts: reduce(torch.add, parts),
) -> Tensor:
    """Merge into ``total`` what other ranks computed for the local columns, all at once; send ``parts``, those of theirs."""
    send, receive = [0] * world.size, [0] * world.size
    for block in blocks:
        send[block.ahead], receive[block.behind] = _length(block.columns), _length(block.sent)
    outgoing = total.new_empty(sum(send), *total.shape[1:])
    by_owner = outgoing.split(send)
    for block, part in zip(blocks, parts, strict=True):  # one part is held at a time, if they come one by one
        by_owner[block.ahead].copy_(part)
    received = exchange_rows(outgoing, send, receive, world).split(receive)
    for sent, parts_of in groupby(sorted(blocks, key=lambda x: (x.sent.start, x.sent.stop)), lambda x: x.sent):
        behind = sorted(block.behind for block in parts_of)
        total[sent] = merge([total[sent], *(received[rank] for rank in behind)])
    return total


class Ring:
    """Bring other ranks' columns here in turn, after the local ones, and return their gradients, in their dtype."""

    gathered = None

    def __init__(self, columns: Tensor, blocks: Sequence[RankBlock], world: World, sent: Tensor) -> None:
        self.columns, self.blocks, self.world, self.sent = columns, blocks, world, sent

    def __iter__(self) -> Iterator[Tensor]:
        visiting = self.columns
        for block in self.blocks[1:]:
            rows = self.sent[block.sent]
            arriving = SendReceive(rows, block.behind, _length(block.columns), block.ahead, self.world)
            yield visiting
            visiting = arriving.wait().to(self.columns.dtype)
        yield visiting

    def windows(self, dtype: torch.dtype) -> Iterator[tuple[Sequence[RankBlock], Tensor]]:
        """Yield each block, and its columns in this dtype."""
        for block, columns in zip(self.blocks, self, strict=True):
            yield [block], columns.to(dtype)

    def return_gradients(self, total: Tensor, parts: Iterable[Tensor]) -> Tensor:
        arriving: list[tuple[Tensor, SendReceive]] = []  # what gradients are added to, and their transfer

        def add() -> None:
            for target, transfer in arriving:
                target += transfer.wait()

        for block, part in zip(self.blocks[1:], parts, strict=True):
            target = total[block.sent]
            transfer = SendReceive(part, block.ahead, len(target), block.behind, self.world)
            add()  # which arrived while this part was computed
            arriving = [(target, transfer)]
        add()
        return total


def _length(x: slice) -> int:
    return x.stop - x.start


def lengths(blocks: Sequence[RankBlock]) -> list[int]:
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
        norms = torch.linalg.vector_norm(rows, dim=1).clamp_(min=MIN_NORM) if self.normalizes else None
        return Operand(rows, None if norms is None else norms.reciprocal_())

    def exchange(self, columns: Tensor, gathered: Tensor | None = None) -> GatherExchange | Ring:
        """Start to bring the factors of other ranks' columns here, unless an earlier exchange has gathered them."""
        blocks = schedule(self.row_shards, self.column_shards, half=self.one_tower)
        sent = columns if self.factors is None else self.factors[1].detach()
        columns = sent.to(columns.dtype)
        if isinstance(self.world, Session) and self.world.ring:
            return Ring(columns, blocks, self.world, sent)
        wait = start_gather(sent, self.column_shards, self.world) if gathered is None else lambda x=gathered: x
        return GatherExchange(columns, blocks, self.column_shards, self.world, wait)

    def complete(self, exchange: GatherExchange | Ring, total: Tensor | None, parts: Iterable[Tensor]) -> None:
        """Compute ``parts``, the gradients of other ranks' columns, and send them if those of the local ones are wanted."""
        if total is not None:
            exchange.return_gradients(total, parts)
        for _ in parts:  # otherwise they are not read, but the gradients of the rows are computed with them
            pass
