"""What all benchmarks share: the program, interleaved times on one process or on ranks, peak memory, new processes."""

import argparse
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from contrastive_zoo.testing.worlds import Worlds
from tools.pages import PAGES, fill

Result = TypeVar("Result")
Runner = Callable[[], object]
Round = dict[str, float]  # seconds per call, by implementation, of those measured in the round
DOUBTFUL = 0.15  # distance of the quartiles relative to the median, above which a figure is doubtful


class Absent(Exception):
    """A peer or a compiler is not available."""


def command_line(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser with ``--name VALUE`` for each default: a flag if it is False, several values if a list."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        kind: dict[str, Any] = {"type": type(default), "default": default}
        if isinstance(default, list):
            kind |= {"type": type(default[0]) if default else str, "nargs": "+"}
        parser.add_argument(f"--{name.replace('_', '-')}", **({"action": "store_true"} if default is False else kind))
    return parser


def program(
    measure: Callable[[argparse.Namespace], Mapping[str, str]],
    description: str | None,
    *,
    page: str = "",
    names: Collection[str] = (),
    **options: Any,
) -> None:
    """Run a measurement of the options as a program: print its tables; ``--docs`` writes them into the page, by part.

    What is measured may be chosen by names.
    """
    parser = command_line(description, **options, **({"docs": False} if page else {}))
    if names:
        parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(names)}; all by default")
    given = parser.parse_args()
    if names:
        if unknown := [x for x in given.names if x not in names]:
            parser.error(f"unknown: {', '.join(unknown)}; names are {', '.join(names)}")
        if page and given.docs and given.names:
            parser.error("--docs writes a page of all: give no name")
        given.names = given.names or list(names)
    tables = measure(given)
    print("\n\n".join(tables.values()))
    if page and given.docs:
        fill(PAGES / page, tables)


def progress(*figures: object) -> None:
    print(*figures, sep=" | ", file=sys.stderr, flush=True)


def on_new_ranks(ranks: int, function: Callable[..., Any], *arguments: Any, threads: int = 1) -> list[Any]:
    """Return what a function returns on each of so many new ranks."""
    with Worlds(torch_threads=threads, timeout=3600.0) as worlds:
        return worlds.run(ranks, function, *arguments)


def slowest_rank(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[float]:
    by_rank = on_new_ranks(ranks, function, *arguments)
    return [max(figures) for figures in zip(*by_rank, strict=True)]


def in_rounds(
    runners: Mapping[str, Runner], *, rounds: int = 1, seconds: float = 0.0, reading: float = 0.0
) -> list[Round]:
    """Return the seconds per call of each implementation, interleaved in rounds, each in rotated order.

    There are at least so many rounds, and more until ``seconds`` are spent. An implementation quicker than ``reading``
    seconds is called several times in a reading. On ranks a reading is that of the slowest rank, so that all stop together.
    Two calls of each come first, which import and allocate; an implementation that runs out of memory in them is left out.
    """
    calls: dict[str, int] = {}
    for name, run in runners.items():
        with suppress(torch.OutOfMemoryError):
            seconds_per_call(run, 1)
            calls[name] = min(MOST_CALLS, max(1, math.ceil(reading / seconds_per_call(run, 1))))
    names, found, spent = list(calls), list[Round](), 0.0
    while len(found) < rounds or spent < seconds:
        found.append({name: seconds_per_call(runners[name], calls[name]) for name in names})
        spent += sum(calls[name] * x for name, x in found[-1].items())
        names = [*names[1:], names[0]]
    return found


MOST_CALLS = 10_000


def seconds_per_call(run: Runner, calls: int) -> float:
    slowest(0.0)  # all ranks begin at the same time
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return slowest(time.perf_counter() - start) / calls


def slowest(seconds: float) -> float:
    if not dist.is_initialized():
        return seconds
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def step_of(loss: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Return a function that runs forward and backward and returns the value; gradients do not add up."""

    def step() -> torch.Tensor:
        for x in inputs:
            x.grad = None
        value = loss(*inputs)
        value.backward()
        return value

    return step


def seconds_of(rounds: Sequence[Round]) -> dict[str, float]:
    """Return the median of the seconds of each implementation, of the rounds that measured it."""
    names = dict.fromkeys(name for x in rounds for name in x)
    return {name: statistics.median(x[name] for x in rounds if name in x) for name in names}


def ratio(rounds: list[Round], name: str, to: str) -> list[float]:
    return [x[name] / x[to] for x in rounds if name in x and to in x]


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
    return low, median, high


def relative_spread(values: list[float]) -> float:
    low, median, high = quartiles(values)
    return (high - low) / median


def resident(kind: str) -> float:
    """Return the resident memory of this process in MB: current (VmRSS) or peak (VmHWM)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(kind)) / 1024


def peak(job: Callable[[], Result]) -> tuple[float, Result]:
    """Return the MB at the peak of a job beyond those before it, and its result (Linux).

    Use a new process: memory that was freed but not returned to the system hides the peak.
    """
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = resident("VmRSS")
    result = job()
    return resident("VmHWM") - before, result


def in_new_process(function: Callable[..., Result], *arguments: Any) -> Result:
    """Return what a function returns in a new process, which imports the module of the function again."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def memory_and_time(
    draw: Callable[[int], list[Any]], step: Callable[..., Any], sizes: tuple[int, int], steps: int
) -> tuple[float, float]:
    """Return the MB at the peak of steps of the larger size beyond those of one of the smaller, and their median seconds; a
    step on all ranks begins together, and its inputs are drawn before."""

    def timed(count: int) -> float:
        inputs = draw(count)
        dist.barrier()
        start = time.perf_counter()
        step(*inputs)
        dist.barrier()
        return time.perf_counter() - start

    small, large = sizes
    timed(small)
    megabytes, readings = peak(lambda: [timed(large) for _ in range(steps)])
    return megabytes, statistics.median(readings)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()


def machine() -> dict[str, Any]:
    kilobytes = next(int(x.split()[1]) for x in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in x)
    cores = torch.get_num_threads()
    return {
        "device": f"{cores} CPU cores, {torch.backends.cpu.get_cpu_capability()}",
        "cores": cores,
        "memory": round(kilobytes / 2**20),
        "torch": torch.__version__.partition("+")[0],
    }
