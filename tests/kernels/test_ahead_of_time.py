"""What the kernels take of a chip, compiled for it here: no spills, matrix instructions, shared memory that is there."""

import json
import os
from pathlib import Path

import pytest

from tests.interpreter import python

pytestmark = pytest.mark.kernels

pytest.importorskip("tests.kernels.ahead_of_time")

SHARED = {80: 99 * 1024, 90: 227 * 1024}
"""Bytes that a program may have: where tiles are those of 8.0, also on 8.6, 8.9 and 12.x, and from 9.0 to 11.x; https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities"""

MATRIX = {80: "mma", 90: "wgmma"}

EVERY = bool(os.environ.get("ALL_DTYPES"))
DTYPES = [("bfloat16", "tf32"), ("float16", "tf32"), ("float32", "tf32"), ("float32", "ieee")]
CASES = [(chip, *of) for chip in (90, 80) for of in DTYPES][: None if EVERY else 1]
"""The others take minutes."""


@pytest.mark.parametrize(("chip", "dtype", "precision"), CASES)
def test_kernels_fit_the_chip(chip: int, dtype: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    program = str(Path(__file__).with_name("ahead_of_time.py"))
    run = python(program, str(chip), dtype, precision, *([] if EVERY else ["inner"]), timeout=900)
    assert run.returncode == 0, run.stderr[-3000:]
    rows = json.loads(run.stdout)
    if dtype == "bfloat16":
        assert len(rows) == (5 if chip == 80 else 8 if EVERY else 3)
    for row in rows:
        assert row["spills"] == 0, row
        assert row["shared"] <= SHARED[chip], row
        assert dtype != "bfloat16" or row[MATRIX[chip]] > 0, row
