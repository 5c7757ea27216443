"""A model of one step on W ranks: FLOP, memory traffic, bytes sent, latency and launches, at rates fitted to measurements.

python benchmarks/scaling.py

Reads benchmarks/results/cpu.json, fits six rates to its cases of the group "scaling", and writes docs/pages/scaling.md: the
fit, and the same formulas at the rates of :data:`GPUS`, measured kernels of one GPU and assumed networks.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from one_rank import HEADER
from scipy.optimize import nnls
from suite.cases import CASES
from suite.harness import quartiles
from suite.report import load_results, number, picture

from contrastive_zoo.ranks.world import _FEW_RANKS, _SMALL
from tools.pages import PAGES, fill, table

FLOAT = 4  # bytes of an element


@dataclass(frozen=True)
class Option:
    towers: int
    kept: bool = False
    ring: bool = False
    mesh: bool = False  # whether the ring has two levels, inside machines and between them

    @property
    def name(self) -> str:
        exchange = "mesh" if self.mesh else "ring" if self.ring else "gathered"
        return f"{'kept' if self.kept else 'tiled'}, {exchange}"


class Amounts(NamedTuple):
    """The work of one rank in a step, or the seconds for one unit of each kind of work."""

    flop: float
    touched: float
    sent: float
    rounds: float
    """Messages that are waited for one after the other."""
    blocks: float
    """Of other ranks' candidates: a few operations each, and a message to each rank."""
    steps: float = 1.0


Rates = Amounts


def amounts(
    option: Option, b: int, d: int, ranks: int, row_element: int = FLOAT, collective: int | None = None
) -> Amounts:
    """Return the amounts of a softmax loss with b anchors of width d on each rank, sent in elements of so many bytes.

    ``collective`` are the rounds in which rows are gathered, and gradients are returned; by default those of gloo.
    """
    half = 0.5 if option.towers == 1 else 1.0
    cells, others = half * b * b * ranks, b * (ranks - 1)
    products = 3 if option.kept else 4
    touches = 8 if option.kept else 10  # exp 2, two sums 2, exp again 2 unless kept, two coefficients added 1, times 3
    columns = 2 * half if option.ring else 1  # a ring sends them twice, but only half of the way with one tower
    scalars = 3 if option.towers == 2 else 1
    small = 1 if ranks <= _FEW_RANKS else doublings(ranks)
    gather = collective or (small if FLOAT * b * d * ranks <= _SMALL else ranks - 1)
    of_rows = 2 * half * ranks if option.ring else gather + (collective or 1)
    return Amounts(
        flop=cells * products * 2 * d,
        touched=cells * touches * FLOAT,
        sent=others * (d * (row_element * columns + FLOAT * half) + 3 * FLOAT)
        + (ranks - 1) * (2 * HEADER + 8 * scalars),
        rounds=((3 + scalars) * small + 1 + of_rows) * (ranks > 1),  # two headers, statistics, and sums to their owners
        blocks=half * (ranks - 1),
    )


def doublings(ranks: int) -> int:
    return math.ceil(math.log2(ranks))


def bytes_held(option: Option, b: int, d: int, ranks: int) -> float:
    """Return the memory of a rank beyond its inputs, in bytes."""
    half = 0.5 if option.towers == 1 else 1.0
    similarities = half * b * b * ranks if option.kept else 0
    received = (5 if option.mesh else 3) * b * d if option.ring else (1 + half) * b * ranks * d
    return FLOAT * (8 * b * d + received * (ranks > 1) + similarities)


# ---------------------------------------------------------------------------------------------------------------- fit

OPTIONS = {"ours, tiled": {}, "ours, kept": {"kept": True}, "ours, tiled, ring": {"ring": True}}


class Point(NamedTuple):
    case: str
    amounts: Amounts
    measured: float

    def seconds(self, rates: Rates) -> float:
        return float(np.dot(self.amounts, rates))


def points(results: dict[str, Any]) -> list[Point]:
    """Return the measurements of the group; ranks beyond the number of cores share cores."""
    found = []
    for case in CASES:
        kept = results["cases"].get("scaling", {}).get(case.name) if case.group == "scaling" else None
        for implementation in case.implementations if kept else ():
            option = Option(towers=2 if case.loss == "CLIP" else 1, **OPTIONS[implementation])
            work = amounts(option, case.shards[0], case.width, case.world)
            turns = max(1.0, case.world / results["machine"]["cores"])
            seconds = quartiles([x[implementation] for x in kept["rounds"] if implementation in x])[1]
            title = f"{case.loss}, b = {case.shards[0]:,}, d = {case.width}, W = {case.world}"
            found.append(Point(title, Amounts(*(turns * x for x in work)), seconds))
    return found


def fitted(measured: Sequence[Point]) -> Rates:
    shares = np.array([[x / point.measured for x in point.amounts] for point in measured])
    unit = shares.max(0).clip(min=1e-300)  # columns of one magnitude
    rates, _ = nnls(shares / unit, np.ones(len(measured)))
    return Rates(*(rates / unit).tolist())


# -------------------------------------------------------------------------------------------------------------- paper


@dataclass(frozen=True)
class Gpu:
    """The assumed device of a rank."""

    flop: float  # a second, of matrix products
    touched: float  # bytes a second, of what passes over tiles
    inside: float  # bytes a second to a rank of the same machine
    outside: float  # to one of another
    latency: float  # seconds a round of messages
    block: float  # seconds of the host to launch a block
    step: float  # and what each step launches
    memory: float  # bytes, of which the loss may have half
    row_element: int = FLOAT  # bytes of an element of an embedding on the wire
    machine: int = 8  # ranks

    @property
    def has_kernels(self) -> bool:
        return self.touched == math.inf  # tiles stay on the chip

    def rates(self, ranks: int) -> Rates:
        link = self.inside if ranks <= self.machine else self.outside
        return Rates(1 / self.flop, 1 / self.touched, 1 / link, self.latency, self.block, self.step)

    def seconds_a_byte(self, ranks: int) -> float:
        """Return the seconds that a byte takes in a ring of two levels: (M − 1) of W − 1 shards come from outside."""
        from_outside = (ranks / self.machine - 1) / (ranks - 1)
        return from_outside / self.outside + (1 - from_outside) / self.inside


KERNEL = 65_536, 768, 46.1e-3  # rows, width and seconds of CLIP on an H100: benchmarks/gpu.md, bfloat16
_BLOCK, _STEP = 9 * 80e-6, 1.5e-3  # as measured there: launches of 50 to 110 µs, nine a block; a small step
_TF32 = Gpu(2.5e14, 2.5e12, inside=3e11, outside=4e10, latency=1e-5, block=_BLOCK, step=_STEP, memory=8e10)
_OF_KERNEL = {"flop": 8 * KERNEL[0] ** 2 * KERNEL[1] / KERNEL[2], "touched": math.inf}
GPUS = {"TF32": _TF32, "bf16": Gpu(**{**vars(_TF32), **_OF_KERNEL, "row_element": 2})}
WIDTH = 768
ROWS, RANKS = (2**16, 2**20, 2**22, 2**24), (8, 64, 1024, 4096)
LIMITS = ("matrix products", "passes over tiles", "network", "latency", "launches", "fixed cost")


class Forecast(NamedTuple):
    seconds: float
    shares: list[float]
    held: float

    @property
    def limit(self) -> str:
        return LIMITS[int(np.argmax(self.shares))]


def forecast(option: Option, rows: int, ranks: int, gpu: Gpu) -> Forecast:
    """Predict one step. Ring transfers overlap the previous block's compute, launches the work of blocks; a gather does not.

    A collective doubles what it sends in each of log₂ W rounds, which use half of a link, or takes the W − 1 rounds of a
    ring: what is quicker.
    """
    b, found = rows // ranks, []
    for collective, share in ((doublings(ranks), 0.5), (ranks - 1, 1.0)):
        work = amounts(option, b, WIDTH, ranks, gpu.row_element, collective)
        if gpu.has_kernels and not option.ring:
            work = work._replace(blocks=0.0)  # all gathered columns are one or two rectangles, of the fixed cost
        parts = [x * rate for x, rate in zip(work, gpu.rates(ranks), strict=True)]
        computing = parts[0] + parts[1]
        parts[2] = work.sent * gpu.seconds_a_byte(ranks) if option.mesh else parts[2] / (1 if option.ring else share)
        if option.ring:
            waiting = max(0.0, parts[2] + parts[3] - computing * (1 - 1 / ranks))
            parts[2], parts[3] = (waiting * x / (parts[2] + parts[3]) for x in parts[2:4])
        parts[4] = max(0.0, parts[4] - computing)
        found.append(Forecast(sum(parts), [x / sum(parts) for x in parts], bytes_held(option, b, WIDTH, ranks)))
    return min(found, key=lambda x: x.seconds)


def best(rows: int, ranks: int, gpu: Gpu, towers: int = 2) -> tuple[Option, Forecast] | None:
    caching = (False,) if gpu.has_kernels else (True, False)  # kernels keep no logits
    options = [Option(towers, kept, ring) for kept in caching for ring in (False, True)]
    if ranks > gpu.machine:
        options += [Option(towers, kept, ring=True, mesh=True) for kept in caching]
    able = [(x, forecast(x, rows, ranks, gpu)) for x in options]
    return min((x for x in able if x[1].held <= gpu.memory / 2), key=lambda x: x[1].seconds, default=None)


# --------------------------------------------------------------------------------------------------------------- page

FIT = """\
Measured on {machine}; one thread per rank; if there are more ranks than cores, ranks share cores. The rates are fitted by
least squares of the relative errors over {count} measurements; the median relative error is {typical:.0%}. Large errors are
errors of the model: it ignores caches and contention between ranks that share a core."""


def write_scaling(results: dict[str, Any]) -> None:
    """Write the parts of the page and its figure; do nothing if the results have no case of the group."""
    measured = points(results)
    if not measured:
        return
    rates = fitted(measured)
    errors = [abs(x.seconds(rates) / x.measured - 1) for x in measured]
    fit = FIT.format(machine=results["machine"]["device"], count=len(measured), typical=float(np.median(errors)))
    picture(draw, PAGES / "figures" / "scaling.svg")
    parts = {"fit": "\n\n".join((fit, rate_table(rates), fit_table(measured, rates))), "forecast": forecast_table()}
    fill(PAGES / "scaling.md", parts)


def rate_table(rates: Rates) -> str:
    def per_second(seconds: float, unit: str) -> str:
        return f"{1e-9 / seconds:,.1f} {unit}" if seconds else "too quick to be seen"

    lines = [
        ["matrix products, a thread", per_second(rates.flop, "GFLOP/s")],
        ["element-wise passes, a thread", per_second(rates.touched, "GB/s")],
        ["what is sent, a rank", per_second(rates.sent, "GB/s")],
        ["a round of messages", f"{1e6 * rates.rounds:,.0f} µs"],
        ["a block of another rank", f"{1e6 * rates.blocks:,.0f} µs"],
        ["fixed, a step", f"{1e6 * rates.steps:,.0f} µs"],
    ]
    return table(["what", "fitted"], lines)


def fit_table(measured: Sequence[Point], rates: Rates) -> str:
    """Return a table of milliseconds and errors of the model, one case per row."""
    lines: dict[str, list[str]] = {}
    for x in measured:
        off = x.seconds(rates) / x.measured - 1
        lines.setdefault(x.case, [x.case]).append(f"{number(1e3 * x.measured)} ({off:+.0%})")
    return table(["ms (error of the model)", *(x.removeprefix("ours, ") for x in OPTIONS)], lines.values())


def forecast_table() -> str:
    lines = []
    for rows, ranks in itertools.product(ROWS, RANKS):
        line = [f"{rows:,}", f"{ranks:,}", f"{rows // ranks:,}"]
        for gpu in GPUS.values():  # the last is bf16
            found = best(rows, ranks, gpu)
            line += [found[0].name, number(found[1].seconds), found[1].limit] if found else ["does not fit", "", ""]
        lines.append([*line, f"{found[1].held / 1e9:.1f}" if found else ""])
    head = ["rows N", "ranks W", "rows b a rank"]
    for name in GPUS:
        head += [f"{name}: option", "seconds", "limited by"]
    return table([*head, "GB held"], lines)


def draw(axes: Any) -> None:
    ranks = [2**x for x in range(3, 11)]
    for rows in ROWS:
        line = [(w, found[1].seconds) for w in ranks if (found := best(rows, w, GPUS["bf16"]))]
        axes.plot(*zip(*line, strict=True), marker="o", ms=3, label=f"{rows:,} rows")
    axes.set(xscale="log", yscale="log", xlabel="ranks W", ylabel="seconds a step, on paper")
    axes.set_xticks(ranks, [str(w) for w in ranks])
    axes.minorticks_off()
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    axes.set_title("CLIP, bf16, the quickest option that fits", loc="left")


if __name__ == "__main__":
    write_scaling(load_results())
