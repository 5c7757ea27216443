"""Time, memory and errors of the losses, of plain torch and of other libraries, side by side in one run.

python benchmarks/bench.py [--full] [--docs] [--peers FOLDER] [--only TEXT …]

pip install --no-deps --target FOLDER lightly open_clip_torch, whose losses are read from their files, past the packages'
imports of torchvision. A peer that is not there is named as absent. With a CUDA device the cases of the group "gpu" run, on
it. Results are kept in benchmarks/results; --only measures again what has these words in its name, --pages nothing.
"""

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from scaling import write_scaling
from suite.cases import BARE, CASES, GEMM, Case
from suite.harness import Absent, Patience, extra_memory, machine, off, race
from suite.report import Results, stored, summary, versions, write_benchmarks, write_readme
from torch import Tensor

from contrastive_zoo.testing.worlds import Worlds

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RESULTS = Path(__file__).parent / "results"
QUICK, FULL = Patience(rounds=2, seconds=5.0), Patience(rounds=7, seconds=60.0)
MANY = ("small", "scaling")
"""Groups of many cases; each gets a quarter of the time, and so do those of few rows."""
SMALL = 512
ROWS_FOR_ERRORS = 1024


def contest(case: Case, ways: Sequence[str], patience: Patience) -> dict[str, Any]:
    """The race, and who was absent; here, or on a rank."""
    found: dict[str, Any] = {"absent": {}}
    runners = {GEMM: case.bare(GEMM, DEVICE)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peers' own
        for way in ways:
            try:
                runners[way] = (case.bare if way in BARE else case.step)(way, DEVICE)
            except Absent as why:
                found["absent"][way] = str(why)
        found["rounds"] = race(runners, patience)
    there = set().union(*found["rounds"])
    found["absent"] |= {way: "out of memory" for way in runners if way != GEMM and way not in there}
    return found


def errors(case: Case, ways: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Of value and gradient against the dense formula in 64 bits, each the largest; here, or on a rank."""
    if case.group != "adversarial":
        case = replace(case, rows=min(case.rows, ROWS_FOR_ERRORS))
    whole = [exact(x) for x in replace(case, shards=()).inputs(DEVICE)]
    truth = replace(case, dtype="float64", shards=()).function("dense")(*whole)
    truth.backward()
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for way in ways:
            if way in BARE:
                continue
            inputs = case.inputs(DEVICE)
            try:
                value = case.function(way)(*inputs)
            except Absent:
                continue
            value.backward()
            found[way] = off(value.detach(), truth.detach()), slope_off(case, inputs, whole)
    return found


def exact(x: Tensor) -> Tensor:
    """The same numbers in 64 bits."""
    return x.detach().double().requires_grad_() if x.is_floating_point() else x


def slope_off(case: Case, inputs: Sequence[Tensor], whole: Sequence[Tensor]) -> float:
    """How far my rows' gradients are from the truth's; on ranks they are W times these."""
    worst = 0.0
    for mine, all_rows in zip(inputs, whole, strict=True):
        if mine.grad is None or all_rows.grad is None:
            continue
        parts = [size * len(all_rows) // case.rows for size in case.shards]
        expected = all_rows.grad.split(parts)[torch.distributed.get_rank()] if parts else all_rows.grad
        if len(mine):
            largest = all_rows.grad.abs().max()
            worst = max(worst, ((mine.grad.double() / case.world - expected).abs().max() / largest).item())
    return worst


def weigh(case: Case, way: str) -> float:
    """Bytes at the peak of one step, in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return extra_memory(replace(case, rows=SMALL).step(way, DEVICE), case.step(way, DEVICE))


def weighed(case: Case, way: str, folders: Sequence[str]) -> float | str:
    """The same in a process of its own; or why not."""
    peers = [x for folder in folders for x in ("--peers", folder)]
    command = [sys.executable, __file__, *peers, "--weigh", str(CASES.index(case)), way]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    return float(done.stdout.splitlines()[-1])


def measured(case: Case, worlds: Worlds, given: argparse.Namespace) -> dict[str, Any]:
    """All of one case."""
    ways = (*case.ways, *(case.full_ways if given.full else ()))
    patience = FULL if given.full else QUICK
    if case.group in MANY or case.rows <= SMALL:
        patience = replace(patience, seconds=patience.seconds / 4)
    found: dict[str, Any] = {}
    if ways:
        if case.shards:
            found = worlds.run(case.world, contest, case, ways, patience, timeout=3600.0)[0]
        else:
            found = contest(case, ways, patience)
        found["rounds"] = [{way: float(f"{x:.5g}") for way, x in x.items()} for x in found["rounds"]]
    if ways and case.group == "adversarial" and case.shards:
        by_rank = worlds.run(case.world, errors, case, ways, timeout=600.0)
        found["errors"] = {way: [max(x[way][i] for x in by_rank) for i in (0, 1)] for way in by_rank[0]}
    elif case.group in ("softmax", "rows", "adversarial", "gpu"):
        found["errors"] = errors(case, ways)
    if case.weighed:
        with ThreadPoolExecutor(2 if DEVICE == "cpu" and case.rows <= 32768 else 1) as pool:
            said = dict(
                zip(case.weighed, pool.map(lambda way: weighed(case, way, given.peers), case.weighed), strict=True)
            )
        found["memory"] = {way: x for way, x in said.items() if not isinstance(x, str)}
        found.setdefault("absent", {}).update({way: x for way, x in said.items() if isinstance(x, str)})
    return found


def chosen(case: Case, given: argparse.Namespace) -> bool:
    """Whether to measure this one, here and now."""
    named = not given.only or any(text == case.group or text in case.name for text in given.only)
    return named and (case.group == "gpu") == (DEVICE == "cuda") and (given.full or not case.full)


def main() -> None:
    """Measure, keep, tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="more cases, more repeats")
    parser.add_argument("--docs", action="store_true", help="write docs/pages/benchmarks.md and scaling.md")
    parser.add_argument("--pages", action="store_true", help="measure nothing, write the pages from what is kept")
    parser.add_argument("--peers", action="append", default=[], metavar="FOLDER", help="where others' packages lie")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="of a case's name or group")
    parser.add_argument("--weigh", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    sys.path += given.peers
    if given.weigh:
        print(weigh(CASES[int(given.weigh[0])], given.weigh[1]))
        return
    file = RESULTS / ("cuda.json" if DEVICE == "cuda" else "cpu.json")
    if not given.pages:
        cases = [case for case in CASES if chosen(case, given)]
        if not cases:
            parser.error(f"no case has any of {', '.join(given.only)} in its name")
        kept = stored(file)["cases"] if given.only and file.exists() else {}
        results: Results = {"machine": machine() | {"peers": versions()}, "full": given.full, "cases": kept}
        file.parent.mkdir(exist_ok=True)
        with Worlds() as worlds:
            for case in cases:
                start = time.perf_counter()
                results["cases"].setdefault(case.group, {})[case.name] = measured(case, worlds, given)
                print(f"{time.perf_counter() - start:6.1f} s  {case.name}", file=sys.stderr, flush=True)
                file.write_text(json.dumps(results, indent=1))  # as it goes, so that an end with Ctrl-C loses nothing
    if given.docs or given.pages:
        by_device = {x.stem: stored(x) for x in sorted(RESULTS.glob("*.json"))}
        write_benchmarks(by_device)
        if "cpu" in by_device:
            write_scaling(by_device["cpu"])
            write_readme(by_device["cpu"])
    print(summary(stored(file)))


if __name__ == "__main__":
    main()
