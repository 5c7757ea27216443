"""Tables of a run: that of docs/pages/measurements.md, and to print one for each group of cases."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from suite.cases import CASES, FASTER, GEMM, Case
from suite.harness import DOUBTFUL, Round, quartiles, ratio, relative_spread, seconds_of
from tools.pages import table
from tools.peer_losses.packages import FOLDER, installed

Results = dict[str, Any]
"""Results of a run: machine, and measurements by group and case."""

RESULTS = Path(__file__).parent.parent / "results" / "cpu.json"
PEERS = ("pytorch-metric-learning", "lightly", "open-clip-torch", "sentence-transformers")

GROUPS = {
    "softmax": "Softmax losses, one process",
    "rows": "Losses of pairs and triplets, one process",
    "small": "Small batches, one process",
    "ranks": "Ranks, one thread each",
}


def page_parts(results: Results) -> dict[str, str]:
    machine = results["machine"]
    found = [
        f"Measured on {machine['device']}, {machine['memory']} GB, torch {machine['torch']}. "
        f"Peers: {', '.join(f'{x} {y}' for x, y in machine['peers'].items()) or 'none'}."
    ]
    for group, title in GROUPS.items():
        if group in results["cases"]:
            found += [f"### {title}", times(results, group)]
    found += ["### Memory", memory(results)]
    return {"speed": headline(results), "results": "\n\n".join(found)}


def headline(results: Results) -> str:
    lines = []
    for case, other in FASTER:
        found = results_of(results, case)
        rounds, held = found.get("rounds", []), found.get("memory", {})
        if factors := ratio(rounds, other, "ours"):
            ms = medians_ms(rounds)
            megabytes = (f"{held[y] / 2**20:,.0f}" if y in held else "" for y in (other, "ours"))
            times = f"{other} {ms[other]:,.0f}", f"{ms['ours']:,.0f}", f"{quartiles(factors)[1]:.1f}×"
            lines.append([case, *times, *megabytes])
    machine = results["machine"]
    titles = ["anchors × d", "other library, ms", "this library, ms", "faster", "other library, MB", "this library, MB"]
    where = f"on {machine['device']}, torch {machine['torch']}"
    return f"{table(titles, lines)}\n\nForward and backward in float32 {where}. `make bench` measures it."


def versions() -> dict[str, str]:
    found = installed(FOLDER, *sys.path)
    return {name: found[name] for name in PEERS if name in found}


def results_of(results: Results, name: str) -> dict[str, Any]:
    return next((cases[name] for cases in results["cases"].values() if name in cases), {})


def spread(values: list[float]) -> str:
    low, median, high = map(number, quartiles(values))
    if len(values) == 1:
        return median
    return f"{median} ({low}–{high}){'?' * (relative_spread(values) > DOUBTFUL)}"


def medians_ms(rounds: list[Round]) -> dict[str, float]:
    return {name: 1000 * seconds for name, seconds in seconds_of(rounds).items()}


def number(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def times(results: Results, group: str) -> str:
    lines = []
    for case, found in measured_cases(results, group):
        title = case.name
        for implementation in case.implementations:
            values = ratio(found["rounds"], implementation, GEMM)
            if not values and implementation not in found["absent"]:
                continue
            line = [title, implementation]
            if values:
                line += [number(medians_ms(found["rounds"])[implementation]), spread(values)]
                line += [f"{x:.0e}" for x in found.get("errors", {}).get(implementation, ())]
            else:
                line += [f"absent: {found['absent'][implementation]}"]
            lines.append(line + [""] * (6 - len(line)))
            title = ""
    head = ["case", "implementation", "ms", "× GEMM", "relative error, value", "relative error, gradient"]
    width = len(head) if any(line[4] for line in lines) else 4  # errors are measured in some groups only
    return table(head[:width], [line[:width] for line in lines])


def memory(results: Results) -> str:
    lines = []
    for group in results["cases"]:
        for case, found in measured_cases(results, group):
            title = case.name
            for implementation in case.memory_of:
                held = found.get("memory", {}).get(implementation)
                why = f"absent: {found.get('absent', {}).get(implementation, 'not in this run')}"
                lines.append([title, implementation, why if held is None else f"{held / 2**20:,.0f}"])
                title = ""
    return table(["case", "implementation", "MB"], lines)


def measured_cases(results: Results, group: str) -> Iterator[tuple[Case, dict[str, Any]]]:
    found = results["cases"].get(group, {})
    return ((case, found[case.name]) for case in CASES if case.group == group and case.name in found)


def load_results(file: Path = RESULTS) -> Results:
    return json.loads(file.read_text(encoding="utf-8"))
