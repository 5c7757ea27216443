"""Values and gradients of the kernels against float64, of three steps on one or several ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.kernels

pytest.importorskip("triton")

ROUNDING = 10 * 2.0**-23
"""What a result may be off by where the dense formula happens to be nearer: units in the last place of float32."""

EVERY = bool(os.environ.get("ALL_DTYPES"))


def results(ranks: int, *arguments: str) -> list[dict[str, Any]]:
    program = Path(__file__).with_name("ranks.py")
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    if not torch.cuda.is_available():
        variables["TRITON_INTERPRET"] = "1"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    run = subprocess.run([*torchrun, program, *arguments], env=variables, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


def worst(case: dict[str, Any]) -> float:
    return max(found / (case["bound"] * dense + ROUNDING) for found, dense in case["errors"])


@pytest.mark.parametrize(("ranks", "chosen"), [(1, "2 7"), (2, "0 30 mutants"), (3, "0 1")][: 3 if EVERY else 2])
def test_as_near_to_float64_as_the_dense_formula(ranks: int, chosen: str) -> None:
    """Some cases, all with ALL_DTYPES=1, also of three ranks; and the mutants, which are not."""
    found = results(ranks, *chosen.split())
    assert any(case["mutant"] for case in found) == ("mutants" in chosen)
    for case in found:
        assert (worst(case) <= 1) == (case["mutant"] is None), (case["case"], case["mutant"], worst(case))
