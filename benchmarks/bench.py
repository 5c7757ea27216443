"""Time, memory and errors of the losses, of plain torch and of other libraries, side by side in one run.

python benchmarks/bench.py [--docs] [--only TEXT …]

The losses of lightly and open_clip are those of ``make .venv/.peers-installed``; a peer that is not
installed is reported as absent. Everything runs on the CPU; gpu.py measures kernels. Results are stored in
benchmarks/results/cpu.json; --only measures again the cases of a group, or whose name contains a text.
"""

import argparse
import json
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from suite import harness
from suite.cases import CASES, GEMM, Case
from suite.harness import Absent
from suite.report import (
    RESULTS,
    Results,
    headline,
    load_results,
    medians_ms,
    number,
    page_parts,
    versions,
)
from torch import Tensor

from contrastive_zoo.testing.worlds import Worlds
from tools.pages import PAGES, fill

ROUNDS, SECONDS = 4, 10.0  # the least of a case
SMALL = 512  # rows; a case of at most so many gets a quarter of the time
SHORTEST = 0.02  # seconds of a reading, in which a quicker implementation is called several times
ROWS_FOR_ERRORS = 1024


def measure_times(case: Case, implementations: Sequence[str], limits: dict[str, Any]) -> dict[str, Any]:
    """Measure the times of the implementations and report the absent ones; runs in this process or on a rank."""
    found: dict[str, Any] = {"absent": {}}
    runners = {GEMM: case.gemm()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of peers
        for implementation in implementations:
            try:
                runners[implementation] = case.step(implementation)
            except Absent as why:
                found["absent"][implementation] = str(why)
        found["rounds"] = harness.in_rounds(runners, reading=SHORTEST, **limits)
    found["absent"] |= dict.fromkeys(runners.keys() - {GEMM}.union(*found["rounds"]), "out of memory")
    return found


def errors(case: Case, implementations: Sequence[str]) -> dict[str, tuple[float, float]]:
    case = replace(case, rows=min(case.rows, ROWS_FOR_ERRORS))
    whole = [
        x.detach().double().requires_grad_() if x.is_floating_point() else x for x in replace(case, shards=()).inputs()
    ]
    truth = replace(case, dtype="float64", shards=()).function("dense")(*whole)
    truth.backward()
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for implementation in implementations:
            inputs = case.inputs()
            try:
                value = case.function(implementation)(*inputs)
            except Absent:
                continue
            value.backward()
            of_value = harness.relative_error(value.detach(), truth.detach())
            found[implementation] = of_value, gradient_error(case, inputs, whole)
    return found


def gradient_error(case: Case, inputs: Sequence[Tensor], whole: Sequence[Tensor]) -> float:
    """Return the relative error of the local gradients, which are W times the reference on ranks."""
    worst = 0.0
    for local, all_rows in zip(inputs, whole, strict=True):
        if local.grad is None or all_rows.grad is None:
            continue
        parts = [size * len(all_rows) // case.rows for size in case.shards]
        expected = all_rows.grad.split(parts)[torch.distributed.get_rank()] if parts else all_rows.grad
        if len(local):
            largest = all_rows.grad.abs().max()
            worst = max(worst, ((local.grad.double() / case.world - expected).abs().max() / largest).item())
    return worst


def step_memory(case: Case, implementation: str) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        replace(case, rows=SMALL).step(implementation)()
        return 2**20 * harness.peak(case.step(implementation))[0]


def memory_or_error(case: Case, implementation: str) -> float | str:
    try:
        return harness.in_new_process(step_memory, case, implementation)
    except Exception as error:  # absent, or killed for want of memory
        return f"{type(error).__name__}: {error}"


def measure_case(case: Case, worlds: Worlds) -> dict[str, Any]:
    implementations = case.implementations
    limits = {"rounds": ROUNDS, "seconds": SECONDS / 4 if case.rows <= SMALL else SECONDS}
    found: dict[str, Any] = {}
    if implementations:
        if case.shards:
            found = worlds.run(case.world, measure_times, case, implementations, limits, timeout=3600.0)[0]
        else:
            found = measure_times(case, implementations, limits)
        found["rounds"] = [{name: float(f"{x:.5g}") for name, x in of_round.items()} for of_round in found["rounds"]]
    if case.group in ("softmax", "rows"):
        found["errors"] = errors(case, implementations)
    if case.memory_of:
        with ThreadPoolExecutor(2 if case.rows <= 32768 else 1) as pool:
            held = pool.map(lambda implementation: memory_or_error(case, implementation), case.memory_of)
            memory = dict(zip(case.memory_of, held, strict=True))
        found["memory"] = {name: x for name, x in memory.items() if not isinstance(x, str)}
        found.setdefault("absent", {}).update({name: x for name, x in memory.items() if isinstance(x, str)})
    return found


def measure(given: argparse.Namespace) -> dict[str, str]:
    texts = given.only or [""]
    cases = [x for x in CASES if any(text == x.group or text in x.name for text in texts)]
    results: Results = {
        "machine": harness.machine() | {"peers": versions()},
        "cases": load_results(RESULTS)["cases"] if given.only and RESULTS.exists() else {},
    }
    with Worlds() as worlds:
        for case in cases:
            start = time.perf_counter()
            results["cases"].setdefault(case.group, {})[case.name] = found = measure_case(case, worlds)
            ms = (f"{name} {number(x)} ms" for name, x in medians_ms(found.get("rounds", [])).items())
            harness.progress(f"{time.perf_counter() - start:6.1f} s", case.name, *ms)
            RESULTS.write_text(json.dumps(results, indent=1))  # after each case, so that Ctrl-C loses nothing
    if given.docs:
        fill(PAGES / "index.md", {"speed": headline(results)})
    return page_parts(results)


if __name__ == "__main__":
    harness.program(measure, __doc__, page="measurements.md", only=[])
