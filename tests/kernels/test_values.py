"""Values and gradients of the kernels: by Triton's interpreter, or on the GPU if there is one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

ROUNDING = {"float32": 10 * 2.0**-23, "bfloat16": 4 * 2.0**-8, "float16": 4 * 2.0**-11}
"""What a result may be off by where the dense formula happens to be nearer: units in the last place. The
interpreter rounds a logit before it subtracts a maximum of 20 bits or more from it; the chip does not."""

CASES = 6 + (48 if torch.cuda.is_available() or os.environ.get("ALL_DTYPES") else 10)


def results() -> list[dict[str, Any]]:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    program = [sys.executable, Path(__file__).with_name("cases.py")]
    run = subprocess.run(program, capture_output=True, text=True, env=environment, timeout=900)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


def test_as_near_to_float64_as_the_dense_formula() -> None:
    """All cases in one test: one program computes them."""
    found = results()
    assert len(found) == CASES
    for case in found:
        for error, dense in case["errors"]:
            assert error <= 1.5 * dense + ROUNDING[case["dtype"]], case
