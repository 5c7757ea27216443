"""How things are measured: taking turns, in one process or on many ranks; memory above what was held before."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

Runner = Callable[[], object]
Round = dict[str, float]
"""Seconds a call, of those who took part."""

DOUBTFUL = 0.15
"""How far apart quartiles are, in medians, when a figure is doubtful."""

MOST_ROUNDS = 50

LARGEST_TURN = 10_000
"""Calls in one reading."""

SLOW = 1.0
"""Seconds from which on a first call tells enough."""


class Absent(Exception):  # noqa: N818
    """A peer, a compiler or a device that is not here."""


@dataclass(frozen=True)
class Patience:
    """When to stop.

    Args:
        rounds: everybody has at least so many readings.
        seconds: for all of a case, shared evenly; a contestant whose share is spent takes part no more, unless its
            figure is :data:`DOUBTFUL`: then when it has spent four shares.
        spread: nor one whose quartiles are this close, relative to its median.
        reading: seconds; what is quicker is called so often that one reading takes this long.
    """

    rounds: int
    seconds: float
    spread: float = 0.03
    reading: float = 0.02


def race(runners: Mapping[str, Runner], patience: Patience) -> list[Round]:
    """Seconds a call of everybody, in rounds in which they take turns; each round begins with another one.

    The first runner is what others are compared with, and takes part in every round. On ranks a reading is the slowest
    rank's, and all ranks see the same numbers, so that they stop together. Who runs out of memory is out.
    """
    reference, share = next(iter(runners)), patience.seconds / len(runners)
    calls: dict[str, int] = {}
    for name, run in runners.items():
        try:
            once = reading(run, 1)
            if once < SLOW:
                once = reading(run, 1)  # the first has loaded what loads
        except torch.OutOfMemoryError:
            continue
        calls[name] = min(LARGEST_TURN, max(1, math.ceil(patience.reading / once)))
    rounds: list[Round] = []
    spent = dict.fromkeys(runners, 0.0)

    def done(name: str) -> bool:
        ratios = ratio(rounds, name, reference)
        if len(ratios) < patience.rounds:
            return False
        apart = relative_spread(ratios)
        settled = len(ratios) >= 3 * patience.rounds and apart <= patience.spread
        return settled or spent[name] >= (4 * share if apart > DOUBTFUL else share)

    while len(rounds) < MOST_ROUNDS and (left := [name for name in calls if name != reference and not done(name)]):
        names = [reference, *left]
        turn = len(rounds) % len(names)
        found = {}
        for name in [*names[turn:], *names[:turn]]:
            found[name] = reading(runners[name], calls[name])
            spent[name] += found[name] * calls[name]
        rounds.append(found)
    return rounds


def reading(run: Runner, calls: int) -> float:
    """Seconds a call; of the slowest rank, where there are several."""
    slowest(0.0)  # begin together
    start = time.perf_counter()
    for _ in range(calls):
        run()
    synchronize()
    return slowest(time.perf_counter() - start) / calls


def slowest(seconds: float) -> float:
    """The largest of all ranks'."""
    if not dist.is_initialized():
        return seconds
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def synchronize() -> None:
    """Wait for the device, if it has a queue."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ratio(rounds: list[Round], name: str, to: str) -> list[float]:
    """One contestant's seconds in another's, for each round in which both took part."""
    return [x[name] / x[to] for x in rounds if name in x and to in x]


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
    return low, median, high


def relative_spread(values: list[float]) -> float:
    """How far the quartiles are apart, in medians."""
    low, median, high = quartiles(values)
    return (high - low) / median


def extra_memory(small: Runner, large: Runner) -> float:
    """Bytes that ``large`` needs at its peak beyond what is held before; ``small`` has loaded what loads (Linux, CUDA).

    In a process that has done more than this, memory that was freed and not given back hides what is needed.
    """
    small()
    synchronize()
    if torch.cuda.is_available():
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        large()
        synchronize()
        return torch.cuda.max_memory_allocated() - held
    held = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest so far
    large()
    return _resident("VmHWM") - held


def _resident(what: str) -> float:
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in status if line.startswith(what))


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest number expected."""
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()


def machine() -> dict[str, Any]:
    """In general terms: what somebody with another one needs to know."""
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        return {"device": gpu.name, "cores": 1, "memory": round(gpu.total_memory / 2**30), "torch": torch.__version__}
    kilobytes = next(int(x.split()[1]) for x in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in x)
    cores = torch.get_num_threads()
    return {
        "device": f"{cores} CPU cores, {torch.backends.cpu.get_cpu_capability()}",
        "cores": cores,
        "memory": round(kilobytes / 2**20),
        "torch": torch.__version__.partition("+")[0],
    }
