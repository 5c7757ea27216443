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
loss, inputs = {loss}
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        loss(*inputs).backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""

LOSSES = {
    "blocks": "cz.Circle(), (torch.randn(2048, 16, requires_grad=True), torch.arange(2048) % 128)",
    "tiles": "cz.NTXent(), torch.randn(2, 4096, 16, requires_grad=True).unbind()",
}


def faults(loss: str, **environment: str) -> int:
    """Page faults of three steps, after three others."""
    script = FAULTS.format(loss=LOSSES[loss])
    command = [sys.executable, "-c", script]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | environment).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's malloc")
@pytest.mark.parametrize("loss", LOSSES)
def test_freed_memory_stays_unless_the_user_tells_malloc_otherwise(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the variable is there is enough; empty, it leaves glibc as it is."""
    for name in (malloc._SWITCH, *malloc._GLIBC_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    kept = faults(loss)
    assert 3 * kept < faults(loss, GLIBC_TUNABLES="")
    assert 3 * kept < faults(loss, CONTRASTIVE_ZOO_MALLOPT="0")
