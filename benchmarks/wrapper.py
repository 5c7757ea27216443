"""Overhead of DistributedLoss on small batches: a step on two ranks against the quickest correct recipe by hand.

python benchmarks/wrapper.py [--before FOLDER] [--rounds 1500]

CLIP and NT-Xent of 64 samples of 128 dimensions per rank, forward and backward, one thread per rank. Implementations take
turns in the same processes, one step at a time, of which the slower rank counts. FOLDER holds ``contrastive_zoo`` of another
revision, such as ``git archive <commit> contrastive_zoo`` makes; it is loaded beside this one. Columns: calls of Python
functions in a step, and milliseconds with their ratio to the recipe by hand: the median, and the 2nd percentile, which other
programs on the machine disturb least.
"""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from suite.cases import CASES, Case
from suite.harness import Round, command_line, in_rounds
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds

BY_HAND = "by hand"
PACKAGE = "contrastive_zoo"
SUBJECTS = [case for case in CASES if BY_HAND in case.implementations]
CALLS_OF = 10  # steps whose calls are counted


class Found(NamedTuple):
    rounds: list[Round]
    calls: dict[str, float]


def revision(folder: str) -> ModuleType:
    """Return the package as it is in a folder; this process keeps its own, too."""
    own = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == PACKAGE}
    for name in own:
        del sys.modules[name]
    sys.path.insert(0, folder)
    try:
        package = importlib.import_module(PACKAGE)
        for name in ("Clip", "NTXent", "DistributedLoss", "LearnableTemperature"):  # imported when they are first used
            assert getattr(package, name) is not getattr(cz, name), f"{folder} is not another revision"
    finally:
        sys.path.remove(folder)
        for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
            del sys.modules[name]
        sys.modules.update(own)
    return package


def ours(package: Any, case: Case) -> Callable[..., Tensor]:
    """Return the loss of a revision, with a learnable temperature if it is CLIP's, as the one by hand has."""
    learnable = package.LearnableTemperature(case.temperature)
    loss, temperature = {"CLIP": (package.Clip, learnable), "NT-Xent": (package.NTXent, case.temperature)}[case.loss]
    return package.DistributedLoss(loss(temperature=temperature))


def measure(case: Case, before: str | None, rounds: int) -> Found:
    losses = {BY_HAND: case.function(BY_HAND), "now": ours(cz, case)}
    if before is not None:
        losses["before"] = ours(revision(before), case)
    inputs = case.inputs()

    def step(loss: Callable[..., Tensor]) -> None:
        for x in inputs:
            x.grad = None
        loss(*inputs).backward()

    runners = {name: lambda loss=loss: step(loss) for name, loss in losses.items()}
    times = in_rounds(runners, rounds=rounds)
    return Found(times, {name: calls_per_step(run) for name, run in runners.items()})


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
    parser = command_line(__doc__, rounds=1500)
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="folder with another revision of contrastive_zoo")
    given = parser.parse_args()
    before = None if given.before is None else str(given.before.resolve())
    ratio = f"× {BY_HAND}"
    table = Table("case", "implementation", "calls", "median, ms", ratio, "2 %, ms", ratio, box=None)
    with Worlds() as worlds:
        for case in SUBJECTS:
            rounds, calls = worlds.run(case.world, measure, case, before, given.rounds, timeout=600.0)[0]
            by_hand = percentiles(rounds, BY_HAND)
            for index, name in enumerate(calls):
                found = percentiles(rounds, name)
                times = [x for a, b in zip(found, by_hand, strict=True) for x in (f"{1000 * a:.2f}", f"{a / b:.2f}")]
                table.add_row(case.name if index == 0 else "", name, f"{calls[name]:.0f}", *times)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
