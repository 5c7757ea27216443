"""Memory is linear in the batch; what is freed stays in the process for the next step, unless the user turns that off."""

import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import contrastive_zoo as cz
from contrastive_zoo.engine import tiling
from tests.helpers import EVERY_CASE

VARIABLES = (tiling._SWITCH, *tiling._GLIBC_VARIABLES)
"""By which a user tells malloc what to keep."""


def printed(script: str, *names: str) -> list[int]:
    """Return what a new interpreter prints with :data:`VARIABLES`; a fork's shared pages are faults when written."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment |= {name: "0" if name == tiling._SWITCH else "" for name in names}  # "" leaves glibc as it is
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


PEAK = """
import gc, re, torch, contrastive_zoo as cz
def loss(n):
    torch.manual_seed(0)
    z = torch.randn(n, 128, requires_grad=True)
    {call}.backward()
    assert z.grad is not None and torch.isfinite(z.grad).all()
def status(name):
    return 1024 * int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1])
loss(64)  # lazy imports, thread pools
gc.collect()
open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts from here
before = status("VmRSS")
with cz.engine.memory_budget(8 * 2**20):  # an eighth of the similarity matrix
    loss(4096)
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells a process its peak memory")
def test_forward_and_backward_stay_linear_in_the_rows_unlike_a_dense_matrix() -> None:
    calls = "cz.InfoNCE(symmetric=True)(z, z.flip(0))", "(z @ z.T).logsumexp(1).sum()"
    ((ours,), (dense,)) = (printed(PEAK.format(call=call)) for call in calls)
    assert ours < 60 * 2**20 < dense / 3


FAULTS = """
import resource, torch, contrastive_zoo as cz
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
"""Page faults of three steps, after three others: of a loss in blocks, and of one in tiles."""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's malloc")
def test_freed_memory_stays_unless_the_user_tells_malloc_otherwise() -> None:
    """That a variable is there is enough."""
    kept = printed(FAULTS)
    for name in ["GLIBC_TUNABLES", tiling._SWITCH][:: 1 if EVERY_CASE else 2]:
        other = printed(FAULTS, name)
        assert all(3 * few < many for few, many in zip(kept, other, strict=True)), (name, kept, other)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What malloc is told, in place of telling it."""
    told: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda *of: told.append(of))
    monkeypatch.setattr(tiling, "ctypes", SimpleNamespace(CDLL=lambda name: library))
    monkeypatch.setattr(tiling, "platform", SimpleNamespace(libc_ver=lambda: ("glibc", "2.36")))
    monkeypatch.setattr(tiling, "_threshold", 0)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return told


def keep(budget: int, device: str = "cpu") -> None:
    with cz.engine.memory_budget(budget):
        tiling.keep_freed_memory(torch.empty(1, device=device))


def test_a_threshold_only_grows_up_to_what_an_int_holds(settings: list[tuple[int, int]]) -> None:
    mib, heap = 2**20, (-3, 5 * 2**20)
    for budget in (mib, mib, 0, 3 * mib, 2**40):
        keep(budget)
    assert settings == [heap, (-1, 34 * mib), heap, (-1, 38 * mib), heap, (-1, 2**31 - 1)]


@pytest.mark.parametrize("name", [*VARIABLES, "another C library", "an accelerator"])
def test_malloc_is_left_alone(name: str, settings: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "another C library":
        monkeypatch.setattr(tiling, "platform", SimpleNamespace(libc_ver=lambda: ("", "")))
    elif name in VARIABLES:
        monkeypatch.setitem(os.environ, name, "0")
    keep(2**20, "meta" if name == "an accelerator" else "cpu")
    assert settings == []
