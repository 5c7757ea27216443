"""Bring the columns of other ranks to this one, and return the gradients of these columns to their owners.

The local block of a schedule comes first, so that the transfer of the other ranks' columns overlaps its computation.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from contrastive_zoo.engine.precision import is_16_bit
from contrastive_zoo.engine.schedule import RankBlock
from contrastive_zoo.ranks.transport import derived, exchange_rows, reduce_scatter_rows, scatters_sums, start_gather
from contrastive_zoo.ranks.world import Shards, World


class GatherExchange:
    """Gather the columns of all ranks in one message, which starts at once; return their gradients in one message."""

    def __init__(
        self,
        columns: Tensor,
        blocks: Sequence[RankBlock],
        shards: Shards,
        world: World,
        dtype: torch.dtype | None = None,
        gathered: Tensor | None = None,
    ) -> None:
        self.columns, self.blocks, self.shards, self.world, self.gathered = columns, blocks, shards, world, gathered
        if gathered is None:
            self.wait = start_gather(wire_rows(columns, dtype, world), shards, world)

    def __iter__(self) -> Iterator[Tensor]:
        yield self.columns
        if self.gathered is None:
            self.gathered = self.wait()
        by_rank = self.gathered.split(self.shards.sizes)
        for block in self.blocks[1:]:
            yield by_rank[block.ahead][block.columns].to(self.columns.dtype)

    def return_gradients(self, total: Tensor, parts: Iterable[Tensor]) -> Tensor:
        """Add the other ranks' gradients of the local columns to ``total``; send ``parts``, those of other columns."""
        if not (scatters_sums(self.shards, self.world) and self._full_schedule):
            return merge_at_owners(total, list(parts), self.blocks[1:], self.world)
        by_rank = {block.ahead: part for block, part in zip(self.blocks, [total, *parts], strict=True)}
        gradients = torch.cat([by_rank[rank] for rank in range(self.world.size)])
        return total.copy_(reduce_scatter_rows(gradients, self.shards, self.world))

    @property
    def _full_schedule(self) -> bool:
        """Whether every rank takes all columns of every other; the same on every rank where shards are even."""
        whole = slice(0, self.shards.size)
        return len(self.blocks) == self.world.size and all(x.columns == x.sent == whole for x in self.blocks)


def wire_rows(columns: Tensor, dtype: torch.dtype | None, world: World) -> Tensor:
    """Return columns as they are sent: in 16 bits if the user passed 16 bits."""
    return derived(lambda x: x.to(dtype), columns, world=world) if is_16_bit(dtype) else columns


class SendReceive:
    """Start to send rows to one rank and to receive rows from another."""

    def __init__(self, rows: Tensor, to: int, count: int, source: int, world: World) -> None:
        self.sent, self.received = rows.contiguous(), rows.new_empty(count, *rows.shape[1:])
        messages = [dist.P2POp(dist.isend, self.sent, group=world.group, group_peer=to)] if len(rows) else []
        if count:
            messages.append(dist.P2POp(dist.irecv, self.received, group=world.group, group_peer=source))
        self.arrived = world.start(
            "a transfer to the next rank of the ring",
            lambda: dist.batch_isend_irecv(messages) if messages else None,
            polled=False,
        )

    def wait(self) -> Tensor:
        self.arrived()
        return self.received


def merge_at_owners(
    total: Tensor,
    parts: Sequence[Tensor],
    blocks: Sequence[RankBlock],
    world: World,
    merge: Callable[[Tensor, Tensor], Tensor] = torch.add,
) -> Tensor:
    """Merge into ``total`` what other ranks computed for the local columns; send ``parts``, computed for theirs."""
    if world.size == 1:
        return total
    by_owner = {block.ahead: part for block, part in zip(blocks, parts, strict=True)}
    by_source = {block.behind: block.sent for block in blocks}
    send = [len(by_owner[rank]) if rank in by_owner else 0 for rank in range(world.size)]
    receive = [by_source[rank].stop - by_source[rank].start if rank in by_source else 0 for rank in range(world.size)]
    outgoing = torch.cat([total[:0], *(by_owner[rank] for rank in sorted(by_owner))])
    received = exchange_rows(outgoing, send, receive, world).split(receive)
    for rank in sorted(by_source):
        total[by_source[rank]] = merge(total[by_source[rank]], received[rank])
    return total
