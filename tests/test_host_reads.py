"""The table of docs/pages/accelerator.md: how often the host reads values of the device."""

import pytest

from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EVERY_CASE
from tests.host_reads import OWN, measured, stated


@pytest.mark.parametrize("first", range(4) if EVERY_CASE else [0])
def test_the_table_is_true(first: int, device_worlds: Worlds) -> None:
    limits = stated()
    found = measured(OWN[first :: 4 if EVERY_CASE else 12], device_worlds)
    for name, numbers in found.items():
        for x, limit in zip(numbers, limits[name], strict=True):
            assert x.waits <= limit.waits, f"{name} reads {x}: name it in docs/pages/accelerator.md, or read less"
            assert x.copies <= limit.copies, f"{name} reads {x}: name it in docs/pages/accelerator.md, or read less"
