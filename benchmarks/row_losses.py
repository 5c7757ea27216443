"""Row losses with compiled block functions beside uncompiled ones, on a GPU if there is one.

python benchmarks/row_losses.py [loss …] [--rows [4096 8192]] [--width 128] [--docs] [--out FILE]

Each pair of loss and number of embeddings runs in a process of its own, plain and compiled steps in turn. A step is forward
and backward of one process. Seconds of compilation are those of the first compiled step beyond a later one, with an empty
cache of kernels. Memory is the peak beyond inputs, in a process that computes only so; on a CPU resident memory (Linux).

On a CPU the figures are stored in benchmarks/results/row_losses.json, from which --docs writes the page.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from suite.harness import command_line, in_new_process, peak
from suite.report import number

import contrastive_zoo as cz
from tools.pages import PAGES, fill, table

RESULTS = Path(__file__).parent / "results" / "row_losses.json"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 3
PER_CLASS = 8  # embeddings of a class

LOSSES: dict[str, Callable[[], Any]] = {
    "Circle": cz.Circle,
    "MultiSimilarity": cz.MultiSimilarity,
    "NCA": cz.NCA,
    "SupCon, in": partial(cz.SupCon, variant="in"),
    "Triplet, hard": partial(cz.Triplet, mining="hard"),
    "Triplet, semi-hard": partial(cz.Triplet, mining="semi-hard"),
}


def step(name: str, implementation: str, rows: int, width: int) -> float:
    torch.manual_seed(0)
    x = torch.randn(rows, width, device=DEVICE, requires_grad=True)
    labels = torch.arange(rows, device=DEVICE) % max(1, rows // PER_CLASS)
    loss = LOSSES[name]().to(DEVICE)
    wait = torch.cuda.synchronize if DEVICE == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    with cz.engine.use_implementation(implementation):
        loss(x, labels).backward()
    wait()
    return time.perf_counter() - start


def seconds(name: str, rows: int, width: int) -> dict[str, float]:
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
    return peak(lambda: step(name, implementation, rows, width))[0]


@contextmanager
def empty_cache() -> Iterator[None]:
    """Let new processes start with no compiled kernel."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        yield


def measured(name: str, rows: int, width: int) -> dict[str, float]:
    with empty_cache():
        found = in_new_process(seconds, name, rows, width)
        for way in ("auto", "compiled"):
            found[f"MB, {way}"] = in_new_process(megabytes, name, way, rows, width)
    print(name, rows, found, file=sys.stderr, flush=True)
    return found


def as_markdown(results: dict[str, dict[str, dict[str, float]]]) -> str:
    lines = []
    for name, by_rows in results.items():
        for rows, x in by_rows.items():
            figures = [x["plain"], x["compiled"], x["compilation"], x["MB, auto"], x["MB, compiled"]]
            plain, compiled, *rest = map(number, figures)
            lines.append([name, f"{int(rows):,}", plain, compiled, f"{x['plain'] / x['compiled']:.2f}", *rest])
    head = ["loss", "rows", "uncompiled, s", "compiled, s", "times faster", "compilation, s", "MB", "MB, compiled"]
    return table(head, lines)


def main() -> None:
    parser = command_line(__doc__, width=128, docs=False)
    parser.add_argument("losses", nargs="*", metavar="loss", help="all by default")
    parser.add_argument("--rows", type=int, nargs="*", default=[4096, 8192], help="none measures nothing")
    parser.add_argument("--out", type=Path, help="append the table to this file")
    given = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if DEVICE == "cpu" and RESULTS.exists() else {}
    for name in given.losses or LOSSES:
        for rows in given.rows:
            results.setdefault(name, {})[str(rows)] = measured(name, rows, given.width)
        if DEVICE == "cpu":
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    found = f"{device}, float32, d = {given.width}\n\n{as_markdown(results)}"
    print(found)
    if given.out:
        with given.out.open("a", encoding="utf-8") as page:
            page.write(f"\n## Row losses, uncompiled and compiled\n\n{found}\n")
    if given.docs:
        fill(PAGES / "accelerator.md", {"row losses": as_markdown(results)})


if __name__ == "__main__":
    main()
