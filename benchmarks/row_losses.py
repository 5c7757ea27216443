"""Row losses with compiled block functions beside uncompiled ones, on a GPU if there is one.

python benchmarks/row_losses.py [loss …] [--rows [4096 8192]] [--width 128] [--traffic] [--docs] [--out FILE]

Each pair of loss and number of embeddings runs in a process of its own, plain and compiled steps in turn. A step is forward
and backward of one process. Seconds of compilation are those of the first compiled step beyond a later one, with an empty
cache of kernels. Memory is the peak beyond inputs, in a process that computes only so; on a CPU resident memory (Linux).

--traffic counts instead what one block reads and writes, forward and backward, in matrices of similarities: by each
operation of the uncompiled loss, and as the compiler counts it.

On a CPU the figures are stored in benchmarks/results/row_losses.json, from which --docs writes the page.
"""

import json
import logging
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
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import contrastive_zoo as cz
from contrastive_zoo.engine import anchor_block
from tools.pages import PAGES, fill, table

RESULTS = Path(__file__).parent / "results" / "row_losses.json"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 3
BREAKING = ("Triplet, semi-hard",)
"""Losses whose graphs break, so that the compiler counts a part of the traffic."""

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


class Traffic(TorchDispatchMode):
    """The bytes of the tensors that operations read and write; views and allocations move none."""

    moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and not any(name in str(func) for name in ("detach", "empty")):
            leaves = torch.utils._pytree.tree_leaves((args, kwargs, out))
            tensors = [x for x in leaves if isinstance(x, Tensor) and x.layout == torch.strided]
            tensors = {x.untyped_storage().data_ptr(): x for x in tensors}.values()
            self.moved += sum(x.numel() * x.itemsize for x in tensors)
        return out


def traffic(name: str, rows: int, width: int) -> dict[str, float]:
    from torch._inductor import config, metrics  # loads the compiler
    from torch._inductor.compile_fx import inductor_metrics_log

    inductor_metrics_log.setLevel(logging.INFO)  # otherwise it does not count
    inductor_metrics_log.propagate = False
    anchor_block.anchor_slices = lambda anchors, candidates: iter([slice(0, len(anchors))])
    with Traffic() as uncompiled:
        step(name, "auto", rows, width)
    with config.patch(fx_graph_cache=False):
        step(name, "compiled", rows, width)
    matrix = 4 * rows * rows
    return {"auto": uncompiled.moved / matrix, "compiled": metrics.num_bytes_accessed / matrix}


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
        counts = by_rows.get("traffic")
        moved = "" if counts is None else f"{number(counts['auto'])} → {number(counts['compiled'])}"
        for rows, x in ((rows, x) for rows, x in by_rows.items() if rows != "traffic"):
            figures = [x["plain"], x["compiled"], x["compilation"], x["MB, auto"], x["MB, compiled"]]
            plain, compiled, *rest = map(number, figures)
            lines.append([name, f"{int(rows):,}", plain, compiled, f"{x['plain'] / x['compiled']:.2f}", *rest, moved])
    head = ["loss", "rows", "uncompiled, s", "compiled, s", "times faster", "compilation, s", "MB", "MB, compiled"]
    return table([*head, "matrices moved"], lines)


def main() -> None:
    parser = command_line(__doc__, width=128, traffic=False, docs=False)
    parser.add_argument("losses", nargs="*", metavar="loss", help="all by default")
    parser.add_argument("--rows", type=int, nargs="*", default=[4096, 8192], help="none measures nothing")
    parser.add_argument("--out", type=Path, help="append the table to this file")
    given = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if DEVICE == "cpu" and RESULTS.exists() else {}
    for name in given.losses or LOSSES:
        if given.traffic and name not in BREAKING:
            with empty_cache():
                results.setdefault(name, {})["traffic"] = in_new_process(traffic, name, 1024, given.width)
        for rows in [] if given.traffic else given.rows:
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
