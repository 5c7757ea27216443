"""Overhead of DistributedLoss on small batches: a step on two ranks against the quickest correct recipe by hand.

python benchmarks/wrapper.py [--rounds 1500]

CLIP and NT-Xent of 64 samples of 128 dimensions per rank, forward and backward, one thread per rank. Implementations take
turns in the same processes, one step at a time, of which the slower rank counts. Columns: calls of Python functions in a
step, and milliseconds with their ratio to the recipe by hand: the median, and the 2nd percentile, which other programs on
the machine disturb least. To compare revisions, run it in a work tree of each.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from suite.cases import CASES, Case
from suite.harness import Round, command_line, in_rounds
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds

BY_HAND = "by hand"
SUBJECTS = [case for case in CASES if BY_HAND in case.implementations]
CALLS_OF = 10  # steps whose calls are counted


def ours(case: Case) -> Callable[..., Tensor]:
    """Return the loss with a learnable temperature if it is CLIP's, as the one by hand has."""
    loss = cz.Clip(temperature=cz.LearnableTemperature(case.temperature)) if case.loss == "CLIP" else None
    return cz.DistributedLoss(loss or cz.NTXent(temperature=case.temperature))


def measure(case: Case, rounds: int) -> tuple[list[Round], dict[str, float]]:
    """Return the seconds of each implementation by round, and its calls in a step."""
    losses, inputs = {BY_HAND: case.function(BY_HAND), "DistributedLoss": ours(case)}, case.inputs()

    def step(loss: Callable[..., Tensor]) -> None:
        for x in inputs:
            x.grad = None
        loss(*inputs).backward()

    runners = {name: lambda loss=loss: step(loss) for name, loss in losses.items()}
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


def percentiles(rounds: list[Round], name: str) -> list[float]:
    return np.quantile([x[name] for x in rounds], [0.5, 0.02]).tolist()


def main() -> None:
    given = command_line(__doc__, rounds=1500).parse_args()
    ratio = f"× {BY_HAND}"
    table = Table("case", "implementation", "calls", "median, ms", ratio, "2 %, ms", ratio, box=None)
    with Worlds() as worlds:
        for case in SUBJECTS:
            rounds, calls = worlds.run(case.world, measure, case, given.rounds, timeout=600.0)[0]
            by_hand = percentiles(rounds, BY_HAND)
            for index, name in enumerate(calls):
                found = percentiles(rounds, name)
                times = [x for a, b in zip(found, by_hand, strict=True) for x in (f"{1000 * a:.2f}", f"{a / b:.2f}")]
                table.add_row(case.name if index == 0 else "", name, f"{calls[name]:.0f}", *times)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
