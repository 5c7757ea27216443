"""Schedule the blocks of a similarity matrix over the ranks: which rank compares which rows with which columns.

A block of ranks is the local rows against the columns of one rank. With two towers every rank computes its block with
every other rank. With one tower S = Sᵀ, so one of the two ranks of a pair computes their block: rank r takes those of
the ⌊W/2⌋ ranks ahead of it, a half ring. With an even W the opposite rank is ahead of both, and each takes half a block.
"""

from dataclasses import dataclass

from contrastive_zoo.world import Shards


@dataclass(frozen=True)
class RankBlock:
    """The local ``rows`` against the ``columns`` of the rank ``ahead``.

    In the same step the rank ``behind`` compares its rows with the local columns ``sent``.
    """

    ahead: int
    rows: slice
    columns: slice
    behind: int
    sent: slice


def schedule(rows: Shards, columns: Shards, *, half: bool) -> list[RankBlock]:
    """Return the blocks that this rank computes, its own block first.

    Args:
        rows: shard sizes of the rows.
        columns: shard sizes of the columns.
        half: whether rows and columns are the same, so that one rank of a pair computes their block.

    Examples:
        >>> [block.ahead for block in schedule(Shards((2,) * 5, rank=3), Shards((2,) * 5, rank=3), half=True)]
        [3, 4, 0]
        >>> opposite = schedule(Shards((2, 6), rank=1), Shards((2, 6), rank=1), half=True)[-1]
        >>> opposite.rows, opposite.columns, opposite.sent
        (slice(0, 6, None), slice(1, 2, None), slice(0, 6, None))
    """
    world_size, rank = len(rows.sizes), rows.rank

    def compared(rank: int, ahead: int) -> tuple[slice, slice]:
        """Return the rows and columns of the block that ``rank`` computes with the rank ``ahead``."""
        every_row, every_column = slice(0, rows.sizes[rank]), slice(0, columns.sizes[ahead])
        if half and 2 * abs(rank - ahead) == world_size:  # the lower rank's rows are halved between the two
            middle = rows.sizes[min(rank, ahead)] // 2
            if rank < ahead:
                return slice(0, middle), every_column
            return every_row, slice(middle, every_column.stop)
        return every_row, every_column

    blocks = []
    for step in range(world_size // 2 + 1 if half else world_size):
        ahead, behind = (rank + step) % world_size, (rank - step) % world_size
        blocks.append(RankBlock(ahead, *compared(rank, ahead), behind, compared(behind, rank)[1]))
    return blocks
