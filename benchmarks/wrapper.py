"""Overhead of DistributedLoss on small batches: a step on two ranks against the quickest correct recipe by hand.

python benchmarks/wrapper.py [--rounds 1500]

CLIP and NT-Xent of 64 samples of 128 dimensions per rank, forward and backward, one thread per rank. Implementations take
turns in the same processes, one step at a time, of which the slower rank counts. Columns: calls of Python functions in a
step, and milliseconds with their ratio to the recipe by hand: the median, and the 2nd percentile, which other programs on
the machine disturb least. To compare revisions, run it in a work tree of each.
"""

import sys
from argparse import Namespace
from collections.abc import Callable
from types import FrameType
from typing import Any

from suite.cases import CASES, Case
from suite.harness import Round, in_rounds, program, seconds_of

from contrastive_zoo.testing.worlds import Worlds
from tools.pages import table

OURS, BY_HAND = "ours", "by hand"
SUBJECTS = [case for case in CASES if BY_HAND in case.implementations]
CALLS_OF = 10  # steps whose calls are counted


def measure(case: Case, rounds: int) -> tuple[list[Round], dict[str, float]]:
    """Return the seconds of each implementation by round, and its calls in a step."""
    runners = {name: case.step(name) for name in (BY_HAND, OURS)}
    for run in runners.values():
        for _ in range(10):
            run()
    calls = {name: calls_per_step(run) for name, run in runners.items()}
    return in_rounds(runners, rounds=rounds), calls


def calls_per_step(run: Callable[[], object]) -> float:
    """Return how many Python functions a step calls, those of torch included."""
    calls = 0

    def listen(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(listen)
    try:
        for _ in range(CALLS_OF):
            run()
    finally:
        sys.setprofile(None)
    return calls / CALLS_OF


def main(given: Namespace) -> dict[str, str]:
    lines = []
    with Worlds() as worlds:
        for case in SUBJECTS:
            rounds, calls = worlds.run(case.world, measure, case, given.rounds, timeout=600.0)[0]
            quantiles = [seconds_of(rounds, x) for x in (0.5, 0.02)]
            for name, count in calls.items():
                times = [x for of in quantiles for x in (f"{1000 * of[name]:.2f}", f"{of[name] / of[BY_HAND]:.2f}")]
                lines.append([case.name, name, f"{count:.0f}", *times])
    ratio = f"× {BY_HAND}"
    return {"wrapper": table(["case", "implementation", "calls", "median, ms", ratio, "2 %, ms", ratio], lines)}


if __name__ == "__main__":
    program(main, __doc__, rounds=1500)
