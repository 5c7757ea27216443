"""Row losses with compiled block functions beside uncompiled ones, on a GPU if there is one.

python benchmarks/row_losses.py [loss …] [--rows 4096 8192] [--width 128] [--docs] [--out FILE]

Each pair of loss and number of rows runs in a process of its own, plain and compiled steps in turn. A step is forward and
backward of one process. Seconds of compilation are those of the first compiled step beyond a later one, with an empty cache
of kernels. Memory is the peak beyond inputs, in a process that computes only so; on a CPU it is resident memory (Linux).

On a CPU the figures are stored in benchmarks/results/row_losses.json, from which --docs writes the page.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from suite.processes import resident
from suite.report import number, table

import contrastive_zoo as cz

RESULTS = Path(__file__).parent / "results" / "row_losses.json"
PAGE = Path(__file__).parent.parent / "docs" / "pages" / "accelerator.md"
BEGIN, END = "<!-- figures: benchmarks/row_losses.py --docs -->\n", "<!-- end of figures -->\n"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 3
PER_CLASS = 8
"""Rows of a class."""

LOSSES: dict[str, Callable[[], Any]] = {
    "Circle": cz.Circle,
    "MultiSimilarity": cz.MultiSimilarity,
    "NCA": cz.NCA,
    "SupCon, in": partial(cz.SupCon, variant="in"),
    "Triplet, hard": partial(cz.Triplet, mining="hard"),
    "Triplet, semi-hard": partial(cz.Triplet, mining="semi-hard"),
}


def step(name: str, implementation: str, rows: int, width: int) -> float:
    """Return the seconds of one step."""
    torch.manual_seed(0)
    x = torch.randn(rows, width, device=DEVICE, requires_grad=True)
    labels = torch.arange(rows, device=DEVICE) % max(1, rows // PER_CLASS)
    loss = LOSSES[name]().to(DEVICE)
    wait()
    start = time.perf_counter()
    with cz.implementation(implementation):
        loss(x, labels).backward()
    wait()
    return time.perf_counter() - start


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def seconds(name: str, rows: int, width: int) -> dict[str, float]:
    """Return the median seconds of plain and of compiled steps, which alternate, and of compilation."""
    step(name, "auto", rows, width)
    first = step(name, "compiled", rows, width)
    pairs = [[step(name, way, rows, width) for way in ("auto", "compiled")] for _ in range(STEPS)]
    plain, compiled = (statistics.median(x) for x in zip(*pairs, strict=True))
    return {"plain": plain, "compiled": compiled, "compilation": first - compiled}


def megabytes(name: str, implementation: str, rows: int, width: int) -> float:
    """Return the peak memory of a step beyond that of a small one."""
    step(name, implementation, 64, width)
    step(name, implementation, 96, width)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / 2**20
        step(name, implementation, rows, width)
        return torch.cuda.max_memory_allocated() / 2**20 - before
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    step(name, implementation, rows, width)
    return resident("VmHWM") - before


def in_new_process(cache: str, *arguments: Any) -> Any:
    """Return what :func:`seconds`, or :func:`megabytes`, returns in a process with this cache of kernels."""
    command, env = [sys.executable, __file__, "--one", json.dumps(arguments)], {"TORCHINDUCTOR_CACHE_DIR": cache}
    found = subprocess.run(command, env=os.environ | env, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(found.stdout.splitlines()[-1])


def measured(name: str, rows: int, width: int) -> dict[str, float]:
    """Return the figures of a loss."""
    with tempfile.TemporaryDirectory() as cache:
        found = in_new_process(cache, "seconds", name, rows, width)
        for way in ("auto", "compiled"):
            found[f"MB, {way}"] = in_new_process(cache, "megabytes", name, way, rows, width)
    print(name, rows, found, file=sys.stderr, flush=True)
    return found


def as_markdown(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return the table of all losses and numbers of rows."""
    lines = []
    for name, by_rows in results.items():
        for rows, x in by_rows.items():
            ratio = f"{x['plain'] / x['compiled']:.2f}"
            figures = [x["plain"], x["compiled"], x["compilation"], x["MB, auto"], x["MB, compiled"]]
            plain, compiled, *rest = map(number, figures)
            lines.append([name, f"{int(rows):,}", plain, compiled, ratio, *rest])
    head = ["loss", "rows", "uncompiled, s", "compiled, s", "times faster", "compilation, s", "MB", "MB, compiled"]
    return table(head, lines)


def main() -> None:
    """Measure, print the table, and write it into the page if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("losses", nargs="*", metavar="loss", help="all by default")
    parser.add_argument("--rows", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--docs", action="store_true", help="write the table into the page")
    parser.add_argument("--out", type=Path, help="append the table to this file")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(globals()[given.one[0]](*given.one[1:])))
        return
    results = json.loads(RESULTS.read_text()) if DEVICE == "cpu" and RESULTS.exists() else {}
    for name in given.losses or LOSSES:
        for rows in given.rows:
            results.setdefault(name, {})[str(rows)] = measured(name, rows, given.width)
            if DEVICE == "cpu":
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    found = as_markdown(results)
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{device}, float32, d = {given.width}\n\n{found}")
    if given.out:
        with given.out.open("a", encoding="utf-8") as page:
            page.write(f"\n## Row losses, uncompiled and compiled\n\n{device}, float32, d = {given.width}\n\n{found}")
    if given.docs:
        text = PAGE.read_text(encoding="utf-8")
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        PAGE.write_text(before + BEGIN + "\n" + found + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
