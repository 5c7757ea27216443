"""Time of a step of large batches on a CPU with and without ``cz.engine.keep_freed_memory()``; each run in a new process.

python benchmarks/freed_memory.py [loss …] [--runs 5] [--docs]

Runs alternate. Seconds are those of one thread of the CPU, system calls included: other programs do not count.
"""

import resource
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from suite.harness import in_new_process, program, progress, step_of

import contrastive_zoo as cz
from tools.pages import table

STEPS = 5

CASES: dict[str, tuple[Callable[[], Any], int, int]] = {
    "InfoNCE": (cz.InfoNCE, 4096, 2),
    "NTXent": (cz.NTXent, 4096, 2),
    "Triplet": (cz.Triplet, 2048, 1),
    "Circle": (cz.Circle, 2048, 1),
}
"""The loss, embeddings of a view, views; 512 features, and without a second view labels of 8 embeddings each."""


def step(name: str, keeps: bool) -> tuple[float, int]:
    """Return the median seconds of a step, and the page faults of all steps."""
    torch.set_num_threads(1)
    if keeps:
        cz.engine.keep_freed_memory()
    torch.manual_seed(0)
    make, rows, views = CASES[name]
    inputs = [torch.randn(rows, 512, requires_grad=True) for _ in range(views)]
    labels = [torch.arange(rows) // 8] if views == 1 else []
    run, times = step_of(make(), [*inputs, *labels]), []
    run()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(STEPS):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return statistics.median(times), (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) // STEPS


def main(given: Namespace) -> dict[str, str]:
    lines = []
    for name in given.names:
        runs = [[in_new_process(step, name, keeps) for keeps in (True, False)] for _ in range(given.runs)]
        (kept, with_faults), (returned, faults) = (
            [statistics.median(figures) for figures in zip(*column, strict=True)] for column in zip(*runs, strict=True)
        )
        ratios = sorted(without[0] / with_call[0] for with_call, without in runs)
        times = [
            f"{kept:.3g}",
            f"{returned:.3g}",
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}–{ratios[-1]:.2f})",
        ]
        lines.append([f"{name}, n = {CASES[name][1]:,}", *times, f"{with_faults:,.0f}", f"{faults:,.0f}"])
        progress(*lines[-1])
    head = ["loss", "with the call, s", "without, s", "ratio (range)", "page faults", "without"]
    return {"freed memory": table(head, lines, texts=1)}


if __name__ == "__main__":
    program(main, __doc__, page="measurements.md", names=CASES, runs=5)
