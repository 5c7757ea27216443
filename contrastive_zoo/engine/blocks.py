"""Which rank compares which rows with whose columns, and how these get there and their gradients back.

S is cut into blocks, my rows against one rank's columns. Two towers: every rank meets every other. One tower: S = Sᵀ,
so each unordered pair of ranks is one block that either of them may compute: rank r takes those of the ⌊W/2⌋ ranks
ahead of it, a half ring; at an even W the rank opposite is ahead of both, and each takes half of that block.

My own block comes first, while the others' columns are on their way.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from contrastive_zoo.collectives import derived, exchange_rows, reduce_scatter_rows, scatters_sums, start_gather
from contrastive_zoo.engine.precision import is_narrow
from contrastive_zoo.world import Shards, World


@dataclass(frozen=True)
class Block:
    """My ``rows`` against the ``columns`` of the rank ahead; of mine, the rank behind gets ``lent``."""

    ahead: int
    rows: slice
    columns: slice
    behind: int
    lent: slice


def schedule(rows: Shards, columns: Shards, *, half: bool) -> list[Block]:
    """The blocks of this rank, its own one first.

    Args:
        rows: where everybody's rows are.
        columns: where everybody's columns are.
        half: whether rows and columns are the same, so that each pair of ranks is one block.

    Example:
        >>> [block.ahead for block in schedule(Shards((2,) * 5, rank=3), Shards((2,) * 5, rank=3), half=True)]
        [3, 4, 0]
        >>> opposite = schedule(Shards((2, 6), rank=1), Shards((2, 6), rank=1), half=True)[-1]
        >>> opposite.rows, opposite.columns, opposite.lent
        (slice(0, 6, None), slice(1, 2, None), slice(0, 6, None))
    """
    world, me = len(rows.sizes), rows.rank

    def taken(rank: int, ahead: int) -> tuple[slice, slice]:
        mine, theirs = slice(0, rows.sizes[rank]), slice(0, columns.sizes[ahead])
        if (
            half and 2 * abs(rank - ahead) == world
        ):  # the lower one takes the first half of its rows, the upper the rest
            middle = rows.sizes[min(rank, ahead)] // 2
            return (slice(0, middle), theirs) if rank < ahead else (mine, slice(middle, theirs.stop))
        return mine, theirs

    blocks = []
    for step in range(world // 2 + 1 if half else world):
        ahead, behind = (me + step) % world, (me - step) % world
        blocks.append(Block(ahead, *taken(me, ahead), behind, taken(behind, me)[1]))
    return blocks


class Gathered:
    """Everybody's columns in one message, under way from the start; what goes back to their owners does in one, too."""

    def __init__(
        self,
        columns: Tensor,
        blocks: Sequence[Block],
        shards: Shards,
        world: World,
        dtype: torch.dtype | None = None,
        everybody: Tensor | None = None,
    ) -> None:
        self.columns, self.blocks, self.shards, self.world, self.everybody = columns, blocks, shards, world, everybody
        if everybody is None:
            self.arrive = start_gather(_packed(columns, dtype, world), shards, world)

    def __iter__(self) -> Iterator[Tensor]:
        yield self.columns
        if self.everybody is None:
            self.everybody = self.arrive()
        by_rank = self.everybody.split(self.shards.sizes)
        for block in self.blocks[1:]:
            yield by_rank[block.ahead][block.columns].to(self.columns.dtype)

    def give_back(self, total: Tensor, parts: Iterable[Tensor]) -> Tensor:
        """``total`` of my columns and what others made for them; ``parts`` is what I made for theirs."""
        if not (scatters_sums(self.shards, self.world) and self._all_meet_all):
            return merge_at_owners(total, list(parts), self.blocks[1:], self.world)
        by_rank = {block.ahead: part for block, part in zip(self.blocks, [total, *parts], strict=True)}
        everybody = torch.cat([by_rank[rank] for rank in range(self.world.size)])
        return total.copy_(reduce_scatter_rows(everybody, self.shards, self.world))

    @property
    def _all_meet_all(self) -> bool:
        """Whether every rank takes all columns of every other; the same on every rank where shards are even."""
        whole = slice(0, self.shards.size)
        return len(self.blocks) == self.world.size and all(x.columns == x.lent == whole for x in self.blocks)


class Ring:
    """One rank's columns at a time, the next already on their way: memory does not grow with the number of ranks.

    The backward pass sends columns again, and each block's gradient back as soon as it is there.
    """

    everybody = None

    def __init__(
        self, columns: Tensor, blocks: Sequence[Block], world: World, dtype: torch.dtype | None = None
    ) -> None:
        self.columns, self.blocks, self.world, self.packed = columns, blocks, world, _packed(columns, dtype, world)

    def __iter__(self) -> Iterator[Tensor]:
        arriving = None
        for index in range(len(self.blocks)):
            columns = self.columns if arriving is None else arriving.wait().to(self.columns.dtype)
            if index + 1 < len(self.blocks):
                block = self.blocks[index + 1]
                rows = block.columns.stop - block.columns.start
                arriving = _Swap(self.packed[block.lent], block.behind, rows, block.ahead, self.world)
            yield columns

    def give_back(self, total: Tensor, parts: Iterable[Tensor]) -> Tensor:
        """``total`` of my columns and what others made for them; ``parts`` is what I made for theirs."""
        returning: tuple[slice, _Swap] | None = None
        for block, part in zip(self.blocks[1:], parts, strict=True):
            rows = block.lent.stop - block.lent.start
            swap = _Swap(part, block.ahead, rows, block.behind, self.world)
            if returning:
                total[returning[0]] += returning[1].wait()
            returning = block.lent, swap
        if returning:
            total[returning[0]] += returning[1].wait()
        return total


def _packed(columns: Tensor, dtype: torch.dtype | None, world: World) -> Tensor:
    """As they travel: in 16 bits if they came so."""
    return derived(lambda x: x.to(dtype), columns, world=world) if is_narrow(dtype) else columns


class _Swap:
    """Rows to one rank and rows from one, under way."""

    def __init__(self, rows: Tensor, to: int, count: int, source: int, world: World) -> None:
        self.sent, self.got = rows.contiguous(), rows.new_empty(count, *rows.shape[1:])
        messages = [dist.P2POp(dist.isend, self.sent, group=world.group, group_peer=to)] if len(rows) else []
        if count:
            messages.append(dist.P2POp(dist.irecv, self.got, group=world.group, group_peer=source))
        self.works = dist.batch_isend_irecv(messages) if messages else []

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.got


def merge_at_owners(
    total: Tensor,
    parts: Sequence[Tensor],
    blocks: Sequence[Block],
    world: World,
    merge: Callable[[Tensor, Tensor], Tensor] = torch.add,
) -> Tensor:
    """``total`` of my columns merged with what others made for them; ``parts`` is what I made for theirs.

    Example:
        >>> merge_at_owners(torch.ones(2), [], [], World())
        tensor([1., 1.])
    """
    if world.size == 1:
        return total
    mine = {block.ahead: part for block, part in zip(blocks, parts, strict=True)}
    lent = {block.behind: block.lent for block in blocks}
    send = [len(mine[rank]) if rank in mine else 0 for rank in range(world.size)]
    receive = [lent[rank].stop - lent[rank].start if rank in lent else 0 for rank in range(world.size)]
    outgoing = torch.cat([total[:0], *(mine[rank] for rank in sorted(mine))])
    arrived = exchange_rows(outgoing, send, receive, world).split(receive)
    for rank in sorted(lent):
        total[lent[rank]] = merge(total[lent[rank]], arrived[rank])
    return total
