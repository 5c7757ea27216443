"""Freed memory stays in the process for the next step, unless the user turns that off."""

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
    for name in (tiling._SWITCH, *tiling._GLIBC_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    kept = faults()
    for name, value in [("GLIBC_TUNABLES", ""), ("CONTRASTIVE_ZOO_MALLOPT", "0")][:: 1 if EVERY_CASE else 2]:
        other = faults(**{name: value})
        assert all(3 * few < many for few, many in zip(kept, other, strict=True)), (name, kept, other)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What malloc is told, in place of telling it."""
    told: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda *of: told.append(of))
    monkeypatch.setattr(tiling, "ctypes", SimpleNamespace(CDLL=lambda name: library))
    monkeypatch.setattr(tiling, "platform", SimpleNamespace(libc_ver=lambda: ("glibc", "2.36")))
    monkeypatch.setattr(tiling, "_threshold", 0)
    for name in (tiling._SWITCH, *tiling._GLIBC_VARIABLES):
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


@pytest.mark.parametrize("name", [tiling._SWITCH, *tiling._GLIBC_VARIABLES, "another C library", "an accelerator"])
def test_malloc_is_left_alone(name: str, settings: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "another C library":
        monkeypatch.setattr(tiling, "platform", SimpleNamespace(libc_ver=lambda: ("", "")))
    elif name.isupper() or name.endswith("_"):
        monkeypatch.setenv(name, "0")
    keep(2**20, "meta" if name == "an accelerator" else "cpu")
    assert settings == []
