"""Memory is linear in the batch; what is freed stays in the process for the next step, if the user asks for that."""

import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

import contrastive_zoo as cz
from contrastive_zoo.engine import tiling

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


KEPT = """
import ctypes, torch, contrastive_zoo as cz
class Info(ctypes.Structure):
    _fields_ = [("arena", ctypes.c_size_t), ("others", 9 * ctypes.c_size_t)]
mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Info
def kept():
    before = mallinfo().arena
    blocks = [torch.empty(4 * 2**20, dtype=torch.uint8) for _ in range(16)]
    del blocks
    return mallinfo().arena - before
print(kept())
cz.engine.keep_freed_memory()
print(kept())
"""
"""Bytes that the heap keeps of 64 MiB, freed in blocks of 4 MiB: by default, and after the call."""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's malloc")
def test_freed_memory_stays_if_the_user_asks_for_it() -> None:
    returned, kept = printed(KEPT)
    assert kept > 56 * 2**20
    assert returned < 8 * 2**20


def told(monkeypatch: pytest.MonkeyPatch, library: str, budget: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    malloc = SimpleNamespace(mallopt=lambda *of: found.append(of))
    monkeypatch.setattr(tiling, "ctypes", SimpleNamespace(CDLL=lambda name: malloc))
    monkeypatch.setattr(tiling, "platform", SimpleNamespace(libc_ver=lambda: (library, "")))
    with cz.engine.memory_budget(budget):
        cz.engine.keep_freed_memory()
    return found


def test_malloc_keeps_two_budgets_and_a_block_up_to_what_an_int_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    mib, heap = 2**20, (-3, 5 * 2**20)
    assert told(monkeypatch, "glibc", mib) == [heap, (-1, 34 * mib)]
    assert told(monkeypatch, "glibc", 2**40) == [heap, (-1, 2**31 - 1)]
    assert told(monkeypatch, "", mib) == []
