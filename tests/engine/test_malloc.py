"""Freed memory stays in the process for the next step, unless the user turns that off."""

import os
import platform
import subprocess
import sys

import pytest

from contrastive_zoo.engine import malloc

FAULTS = """
import resource, torch, contrastive_zoo as cz
torch.set_num_threads(1)
def faults(loss, *inputs):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        loss(*inputs).backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
blocks = cz.Circle(), torch.randn(2048, 16, requires_grad=True), torch.arange(2048) % 128
tiles = cz.NTXent(), *torch.randn(2, 2048, 16, requires_grad=True).unbind()
for case in (blocks, tiles):
    faults(*case)
    print(faults(*case))
"""


def faults(**environment: str) -> list[int]:
    """Page faults of three steps, after three others: of a loss in blocks, and of one in tiles."""
    command = [sys.executable, "-c", FAULTS]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | environment)
    return [int(line) for line in done.stdout.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's malloc")
def test_freed_memory_stays_unless_the_user_tells_malloc_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the variable is there is enough; empty, it leaves glibc as it is."""
    for name in (malloc._SWITCH, *malloc._GLIBC_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    kept = faults()
    for other in (faults(GLIBC_TUNABLES=""), faults(CONTRASTIVE_ZOO_MALLOPT="0")):
        assert all(3 * few < many for few, many in zip(kept, other, strict=True)), (kept, other)
