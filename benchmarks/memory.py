"""Peak extra memory of every loss, forward and backward, on one process; each in a process of its own.

python benchmarks/memory.py [--rows 16384] [--width 128] [name …]
"""

import argparse
import subprocess
import sys
import time

import torch

from contrastive_zoo.catalogue import CATALOGUE


def peak_megabytes() -> float:
    """The high-water mark of this process's resident memory."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def measure(name: str, rows: int, width: int) -> None:
    """Print the peak above what the process held after a small step, and the seconds of the large one."""
    species = CATALOGUE[name]
    loss = species.make()

    def step(n: int) -> None:
        if species.call == "labels":
            given = (torch.randn(n, width, requires_grad=True), torch.arange(n) % max(2, n // 32) % 64)
        else:
            given = tuple(torch.randn(n // 2, width, requires_grad=True) for _ in range(2))
        loss(*given).backward()

    step(64)
    before, start = peak_megabytes(), time.perf_counter()
    step(rows)
    print(f"{name:28s} {peak_megabytes() - before:8.0f} MB {time.perf_counter() - start:8.1f} s", flush=True)


def main() -> None:
    """Measure the losses named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", default=list(CATALOGUE))
    given = parser.parse_args()
    for name in given.names:
        if given.here:
            measure(name, given.rows, given.width)
        else:
            sizes = ["--rows", str(given.rows), "--width", str(given.width)]
            subprocess.run([sys.executable, __file__, "--here", *sizes, name], check=False)


if __name__ == "__main__":
    main()
