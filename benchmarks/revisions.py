"""Time of the softmax engines in two revisions of the library: a process each, in turn, so that both meet the same machine.

python benchmarks/revisions.py [--rounds 15] [--rows 4096] [--width 512] BEFORE [AFTER]

BEFORE and AFTER are folders that hold ``contrastive_zoo``, such as ``git archive <commit> contrastive_zoo`` makes; AFTER is
this checkout by default. Prints the median of the ratios of rounds, after divided by before, with quartiles.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

NAMES = ("CLIP", "NT-Xent", "SupCon", "MNRL")
WORKER = "--worker"


def steps(rows: int, width: int) -> dict[str, Callable[[], None]]:
    """Return a forward and backward step of each loss, in the revision that this process imports."""
    import contrastive_zoo as cz  # the first folder of the path decides which

    generator = torch.Generator().manual_seed(0)
    a = torch.randn(rows, width, generator=generator)
    a, b = (x.requires_grad_() for x in (a, a + torch.randn(rows, width, generator=generator)))
    both, labels = torch.cat([a, b]).detach().requires_grad_(), torch.arange(rows).repeat(2)
    clip, nt_xent, sup_con, mnrl = cz.InfoNCE(symmetric=True), cz.NTXent(), cz.SupCon(), cz.MNRL()
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "CLIP": lambda: clip(a, b),
        "NT-Xent": lambda: nt_xent(a, b),
        "SupCon": lambda: sup_con(both, labels),
        "MNRL": lambda: mnrl(a, b),
    }
    return {name: lambda call=call: call().backward() for name, call in calls.items()}  # type: ignore[misc]  # a default


def work(rows: int, width: int) -> None:
    """Answer each name that arrives with the seconds of a step."""
    by_name = steps(rows, width)
    for line in sys.stdin:
        start = time.perf_counter()
        by_name[line.strip()]()
        print(time.perf_counter() - start, flush=True)


def seconds(worker: "subprocess.Popen[str]", name: str) -> float:
    """Return the seconds of one step in a worker."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(f"{name}\n")
    worker.stdin.flush()
    return float(worker.stdout.readline())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument(WORKER, action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given.rows, given.width)
        return
    before, after = [*given.folders, Path(__file__).parent.parent][:2]
    command = [sys.executable, __file__, WORKER, f"--rows={given.rows}", f"--width={given.width}", "."]
    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                subprocess.Popen(
                    command,
                    env={"PYTHONPATH": str(x.resolve())},
                    text=True,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
            for x in (before, after)
        ]
        for name in NAMES:
            for worker in workers:
                seconds(worker, name)
            found = []
            for number in range(given.rounds):
                order = workers if number % 2 else workers[::-1]
                of = {id(worker): seconds(worker, name) for worker in order}
                found.append(tuple(of[id(worker)] for worker in workers))
            low, middle, high = statistics.quantiles((new / old for old, new in found), n=4)
            old, new = (1e3 * statistics.median(column) for column in zip(*found, strict=True))
            print(
                f"{name:8s} {old:7.0f} ms {new:7.0f} ms   after / before {middle:.3f} ({low:.3f} to {high:.3f})",
                flush=True,
            )
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.close()


if __name__ == "__main__":
    main()
