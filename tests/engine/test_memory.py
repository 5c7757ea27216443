"""Memory is linear in the batch."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.figures


def printed(script: str) -> list[int]:
    """Return what a new interpreter prints with glibc's defaults."""
    environment = {x: value for x, value in os.environ.items() if not x.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=environment | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


PEAK = """
import gc, re, torch, contrastive_zoo as cz
def step(loss, n):
    torch.manual_seed(0)
    z = torch.randn(n, 128, requires_grad=True)
    loss(z).backward()
    assert z.grad is not None and torch.isfinite(z.grad).all()
def status(name):
    return 1024 * int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1])
for loss in lambda z: cz.InfoNCE(symmetric=True)(z, z.flip(0)), lambda z: (z @ z.T).logsumexp(1).sum():
    step(loss, 64)  # lazy imports, thread pools
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts from here
    before = status("VmRSS")
    with cz.engine.memory_budget(8 * 2**20):  # an eighth of the similarity matrix
        step(loss, 4096)
    print(status("VmHWM") - before)
"""
"""Bytes that a step takes with a loss of this library, and with a formula that holds the similarity matrix."""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells a process its peak memory")
def test_forward_and_backward_stay_linear_in_the_rows_unlike_a_dense_matrix() -> None:
    ours, dense = printed(PEAK)
    assert ours < 60 * 2**20 < dense / 3
