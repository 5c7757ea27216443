"""Schedule the blocks of a similarity matrix over the ranks: which rank compares which rows with which columns.

A block of ranks is the local rows against the columns of one rank. With two towers every rank computes its block with
every other rank. With one tower S = Sᵀ, so one of the two ranks of a pair computes their block: rank r takes those of
the ⌊W/2⌋ ranks ahead of it, a half ring. With an even W the opposite rank is ahead of both, and each takes half a block.

With M machines of L ranks, the columns of a machine visit another machine as a whole. One of the two machines of a pair
compares its rows with the columns of the other, half of the machines being ahead of it; inside a machine, ranks are in a
half ring. So the columns of a pair of machines are sent from one to the other, and not back.
"""

from dataclasses import dataclass

from contrastive_zoo.ranks.world import Machines, Shards


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

    ``half`` says whether rows and columns are the same, so that one rank of a pair computes their block.

    Examples:
        >>> [block.ahead for block in schedule(Shards((2,) * 5, rank=3), Shards((2,) * 5, rank=3), half=True)]
        [3, 4, 0]
        >>> opposite = schedule(Shards((2, 6), rank=1), Shards((2, 6), rank=1), half=True)[-1]
        >>> opposite.rows, opposite.columns, opposite.sent
        (slice(0, 6, None), slice(1, 2, None), slice(0, 6, None))
    """
    return schedule_by_machine(rows, columns, (tuple(range(len(rows.sizes))),), half=half)[0]


def schedule_by_machine(rows: Shards, columns: Shards, layout: Machines, *, half: bool) -> list[list[RankBlock]]:
    """Return the blocks that this rank computes by the machine whose columns they have, its own machine and block first.

    ``layout`` are the ranks of each machine; the rest is as in :func:`schedule`.

    Examples:
        >>> shards, two_machines = Shards((1,) * 4, rank=1), ((0, 1), (2, 3))
        >>> [[block.ahead for block in x] for x in schedule_by_machine(shards, shards, two_machines, half=False)]
        [[1, 0], [3, 2]]
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
        if (
            half and 2 * steps == ring_size
        ):  # each is ahead of the other: the first one's rows are halved between the two
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
