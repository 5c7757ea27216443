"""The table of docs/pages/accelerator.md: how often the host reads values of the device."""

from pathlib import Path

import pytest

from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EVERY_CASE
from tests.host_reads import OWN, Reads, measured

PAGE = Path(__file__).parents[1] / "docs" / "pages" / "accelerator.md"


def stated() -> dict[str, list[str]]:
    """Return both numbers by the name of the loss."""
    lines = PAGE.read_text().split("| without checks |")[1].split("\n\n")[0].splitlines()[2:]
    rows = [[x.strip() for x in line.strip("|").split("|")] for line in lines]
    return {name: numbers for *numbers, names in rows for name in names.split("; ")}


def test_the_table_has_every_loss() -> None:
    assert sorted(stated()) == sorted(OWN)


@pytest.mark.parametrize("first", range(4) if EVERY_CASE else [0])
def test_the_table_is_true(first: int, device_worlds: Worlds) -> None:
    found = measured(OWN[first :: 4 if EVERY_CASE else 12], device_worlds)
    for name, numbers in found.items():
        limits = [Reads(*map(int, x.split(" / "))) for x in stated()[name]]
        assert all(
            x.waits <= limit.waits and x.copies <= limit.copies for x, limit in zip(numbers, limits, strict=True)
        ), name
