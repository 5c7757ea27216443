"""Row losses with compiled block functions beside uncompiled ones, on a GPU if there is one.

python benchmarks/row_losses.py [loss …] [--rows 4096 8192] [--width 128] [--docs]

Each pair of loss and number of embeddings runs in a process of its own, plain and compiled steps in turn. A step is forward
and backward of one process. Seconds of compilation are those of the first compiled step beyond a later one, with an empty
cache of kernels. Memory is the peak beyond inputs, in a process that computes only so; on a CPU resident memory (Linux).
"""

import os
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from suite.harness import in_new_process, peak, program, progress
from suite.report import number

import contrastive_zoo as cz
from tools.pages import table

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


def measured(name: str, rows: int, width: int) -> list[str]:
    """Return a line of the table."""
    with empty_cache():
        x = in_new_process(seconds, name, rows, width)
        memory = [in_new_process(megabytes, name, way, rows, width) for way in ("auto", "compiled")]
    plain, compiled, *rest = map(number, [x["plain"], x["compiled"], x["compilation"], *memory])
    line = [name, f"{rows:,}", plain, compiled, f"{x['plain'] / x['compiled']:.2f}", *rest]
    progress(*line)
    return line


def main(given: Namespace) -> dict[str, str]:
    lines = [measured(name, rows, given.width) for name in given.names for rows in given.rows]
    head = ["loss", "rows", "uncompiled, s", "compiled, s", "times faster", "compilation, s", "MB", "MB, compiled"]
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return {"row losses": f"{device}, float32, d = {given.width}:\n\n{table(head, lines)}"}


if __name__ == "__main__":
    program(main, __doc__, page="accelerator.md", names=LOSSES, rows=[4096, 8192], width=128)
