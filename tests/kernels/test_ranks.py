"""Values and gradients of the kernels against float64, of three steps on one or several ranks."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from contrastive_zoo.testing.auditing.launch import environment, local_store

pytestmark = pytest.mark.kernels

pytest.importorskip("triton")

ROUNDING = 10 * 2.0**-23
"""What a result may be off by where the dense formula happens to be nearer: units in the last place of float32."""

EVERY = bool(os.environ.get("ALL_DTYPES"))


def results(ranks: int, *arguments: str) -> list[dict[str, Any]]:
    store = local_store()
    shared = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    if not torch.cuda.is_available():
        shared["TRITON_INTERPRET"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(ranks):
            with Path(folder, str(rank)).open("w") as errors:
                variables = shared | environment(rank, ranks, store.port)
                command = [sys.executable, str(Path(__file__).with_name("ranks.py")), *arguments]
                started.append(
                    subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=errors, text=True)
                )
        try:
            printed = [process.communicate(timeout=600)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        texts = [Path(folder, str(rank)).read_text()[-3000:] for rank in range(ranks)]
    assert not any(process.returncode for process in started), texts
    return json.loads(printed[0])


def worst(case: dict[str, Any]) -> float:
    return max(found / (case["bound"] * dense + ROUNDING) for found, dense in case["errors"])


@pytest.mark.parametrize(
    ("ranks", "chosen"), [(1, ["2", "7"]), (2, ["0", "30", "mutants"]), *([(3, ["0", "1"])] if EVERY else [])]
)
def test_as_near_to_float64_as_the_dense_formula(ranks: int, chosen: list[str]) -> None:
    """Some cases, all with ALL_DTYPES=1, also of three ranks; and the mutants, which are not."""
    found = results(ranks, *chosen)
    assert any(case["mutant"] for case in found) == ("mutants" in chosen)
    for case in found:
        assert (worst(case) <= 1) == (case["mutant"] is None), (case["case"], case["mutant"], worst(case))
