"""Print how often a step of each loss reads values of the device: ``python -m tests.host_reads``, a table of the docs."""

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.measurement import whole_batch
from contrastive_zoo.testing.worlds import Worlds
from tests.simulated import send_from_device
from tests.test_accelerated_ranks import ENTRIES, SHARDS, Steps, is_own
from tests.zoo import Entry

PAGE = Path(__file__).parents[1] / "docs" / "pages" / "accelerator.md"

OTHERS = "all others"
"""What the table calls the losses that it does not name."""


class Reads(NamedTuple):
    """Reads of one step."""

    waits: int
    """Reads, copies to the device and pinned memory, for which the host waits."""
    copies: int
    """Copies that the host reads in the next step."""

    def __str__(self) -> str:
        return f"{self.waits} / {self.copies}"


def of_rank(entries: list[Entry], rank: int) -> list[tuple[Reads, Reads]]:
    """Return the reads of the third step of each loss, without checks and with the default options."""
    found = []
    for entry in entries:
        rows = whole_batch(entry.case(), GlobalBatch(SHARDS, d=3, labels="mixed", seed=5))
        local = [x.split(SHARDS)[rank] for x in rows]
        unchecked = Steps(entry, local, static_shapes=True, check_finite=False, check_equal=False, check_distinct=False)
        found.append(tuple(Reads(len(x.reads), len(x.copies)) for x in (unchecked, Steps(entry, local))))
    return found


def measured(names: list[str], pool: Worlds) -> dict[str, tuple[Reads, Reads]]:
    """Return the reads of losses by name, without checks and with the default options."""
    entries = [entry for entry in ENTRIES if str(entry) in names]
    indices = [ENTRIES.index(entry) for entry in entries]

    def job() -> list[tuple[Reads, Reads]]:
        import torch.distributed as dist

        return of_rank([ENTRIES[index] for index in indices], dist.get_rank())

    by_rank = pool.run(2, job, timeout=300)
    return dict(zip(map(str, entries), by_rank[0], strict=True))


OWN = [str(entry) for entry in ENTRIES if is_own(entry)]


def table(reads: dict[str, tuple[Reads, Reads]]) -> str:
    """Return the table: losses with equal numbers in one row, and of the most frequent numbers no names."""
    rows = defaultdict(list)
    for name, of_loss in sorted(reads.items()):
        rows[of_loss].append(name)
    most = max(map(len, rows.values()))
    lines = ["| without checks | defaults | losses |", "|---|---|---|"]
    lines += [
        f"| {off} | {on} | {OTHERS if len(names) == most else '; '.join(names)} |"
        for (off, on), names in sorted(rows.items())
    ]
    return "\n".join(lines)


def stated() -> dict[str, tuple[Reads, Reads]]:
    """Return what the page says of every loss."""
    lines = PAGE.read_text(encoding="utf-8").split("| without checks |")[1].split("\n\n")[0].splitlines()[2:]
    rows = [[x.strip() for x in line.strip("|").split("|")] for line in lines]
    named = {
        name: (Reads(*map(int, off.split(" / "))), Reads(*map(int, on.split(" / "))))
        for off, on, names in rows
        for name in names.split("; ")
    }
    others = named.pop(OTHERS)
    assert named.keys() <= set(OWN), f"{PAGE.name} names losses that are in no table tests/losses/zoo_*.py"
    return {name: named.get(name, others) for name in OWN}


def main() -> None:
    """Print the table."""
    with Worlds(timeout=300) as pool:
        pool.run(2, send_from_device)
        print(table(measured(OWN, pool)))


if __name__ == "__main__":
    main()
