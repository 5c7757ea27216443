"""How often the host reads values of the device: ``python -m tests.test_host_reads`` prints a table of accelerator.md."""

from collections import defaultdict
from pathlib import Path

import pytest
import torch.distributed as dist

from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.measurement import whole_batch
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EVERY_CASE
from tests.simulated import send_from_device
from tests.test_accelerated_ranks import ENTRIES, SHARDS, Steps, is_own

PAGE = Path(__file__).parents[1] / "docs" / "pages" / "accelerator.md"
OTHERS = "all others"  # what the table calls the losses that it does not name
OWN = [str(entry) for entry in ENTRIES if is_own(entry)]

Reads = tuple[str, str]
"""Of a step without checks and with the default options: "waits / copies", of which the host reads those a step later."""


def of_rank(names: list[str]) -> dict[str, Reads]:
    """Return the reads of the third step of each loss."""
    found = {}
    for entry in (entry for entry in ENTRIES if str(entry) in names):
        rows = whole_batch(entry.case(), GlobalBatch(SHARDS, d=3, labels="mixed", seed=5))
        local = [x.split(SHARDS)[dist.get_rank()] for x in rows]
        unchecked = Steps(entry, local, check_finite=False, check_equal=False, check_distinct=False)
        off, on = (f"{len(x.reads)} / {len(x.copies)}" for x in (unchecked, Steps(entry, local)))
        found[str(entry)] = (off, on)
    return found


def measured(names: list[str], pool: Worlds) -> dict[str, Reads]:
    return pool.run(2, of_rank, names, timeout=300)[0]


def stated() -> dict[str, Reads]:
    """Return what the page says of every loss."""
    lines = PAGE.read_text(encoding="utf-8").split("| without checks |")[1].split("\n\n")[0].splitlines()[2:]
    rows = [[x.strip() for x in line.strip("|").split("|")] for line in lines]
    named = {name: (off, on) for off, on, names in rows for name in names.split("; ")}
    others = named.pop(OTHERS)
    assert named.keys() <= set(OWN), f"{PAGE.name} names losses that are in no table tests/losses/zoo_*.py"
    return {name: named.get(name, others) for name in OWN}


@pytest.mark.parametrize("first", range(4) if EVERY_CASE else [0])
def test_the_table_is_true(first: int, device_worlds: Worlds) -> None:
    limits = stated()
    for name, found in measured(OWN[first :: 4 if EVERY_CASE else 12], device_worlds).items():
        for x, limit in zip(found, limits[name], strict=True):
            is_kept = all(int(a) <= int(b) for a, b in zip(x.split(" / "), limit.split(" / "), strict=True))
            assert is_kept, f"{name} reads {x}: name it in docs/pages/accelerator.md, or read less"


def main() -> None:
    """Print the table: losses with equal numbers in one row, and of the most frequent numbers no names."""
    rows = defaultdict(list)
    with Worlds(timeout=300) as pool:
        pool.run(2, send_from_device)
        for name, of_loss in sorted(measured(OWN, pool).items()):
            rows[of_loss].append(name)
    most = max(map(len, rows.values()))
    print("| without checks | defaults | losses |\n|---|---|---|")
    for (off, on), names in sorted(rows.items()):
        print(f"| {off} | {on} | {OTHERS if len(names) == most else '; '.join(names)} |")


if __name__ == "__main__":
    main()
