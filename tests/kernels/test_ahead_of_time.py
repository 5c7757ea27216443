"""What the kernels take of a chip, compiled for it here: no spills, matrix instructions, shared memory that is there."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.kernels

pytest.importorskip("tests.kernels.ahead_of_time")

SHARED = {80: 99 * 1024, 90: 227 * 1024}
"""Bytes that a program may have: where tiles are those of 8.0, also on 8.6, 8.9 and 12.x, and from 9.0 to 11.x; https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities"""

MATRIX = {80: "mma", 90: "wgmma"}


def table(chip: int, dtype: str, precision: str, *inner: str) -> list[dict[str, Any]]:
    here = Path(__file__)
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(here.parents[2])])  # of another Triton
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0"}
    run = subprocess.run(
        [sys.executable, here.with_name("ahead_of_time.py"), str(chip), dtype, precision, *inner],
        capture_output=True, text=True, env=environment, timeout=900,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


SLOW = pytest.mark.skipif(
    "not __import__('os').environ.get('ALL_DTYPES')", reason="takes minutes; ALL_DTYPES=1 runs it"
)


DTYPES = [("bfloat16", "tf32"), ("float16", "tf32"), ("float32", "tf32"), ("float32", "ieee")]


@pytest.mark.parametrize(
    ("chip", "dtype", "precision"),
    [
        (90, "bfloat16", "tf32"),
        *(pytest.param(chip, *of, marks=SLOW) for chip in (80, 90) for of in DTYPES if (chip, of) != (90, DTYPES[0])),
    ],
)
def test_kernels_fit_the_chip(chip: int, dtype: str, precision: str) -> None:
    every = bool(os.environ.get("ALL_DTYPES"))
    rows = table(chip, dtype, precision, *([] if every else ["inner"]))
    if dtype == "bfloat16":
        assert len(rows) == (5 if chip == 80 else 8 if every else 3)
    for row in rows:
        assert row["spills"] == 0, row
        assert row["shared"] <= SHARED[chip], row
        assert dtype != "bfloat16" or row[MATRIX[chip]] > 0, row
