"""The result of a run: a score for each module, and what survived."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tools import pages
from tools.mutants.equivalent import EQUIVALENT

COLUMNS = ("caught", "timed out", "equivalent", "survived")


def name_of(result: dict[str, Any]) -> tuple[str, str, str]:
    """Module, function and change, as :attr:`tools.mutants.changes.Mutant.name` has them."""
    return result["path"], result["place"][0], result["change"]


def outcome(result: dict[str, Any]) -> str:
    """What is counted of a mutant; a survivor of the list of equivalent ones apart."""
    is_equivalent = result["verdict"] == "survived" and name_of(result) in EQUIVALENT
    return "equivalent" if is_equivalent else str(result["verdict"])


def table(results: Sequence[dict[str, Any]]) -> str:
    """A row for each module, and the score of all.

    Examples:
        >>> print(table([{"path": "engine/exchange.py", "place": ["f", 1, 1], "change": "1 → 2", "verdict": "caught"}]))
        | module | mutants | caught | timed out | equivalent | survived |
        | --- | ---: | ---: | ---: | ---: | ---: |
        | `engine/exchange.py` | 1 | 1 | 0 | 0 | 0 |
        | all | 1 | 1 | 0 | 0 | 0 |
    """
    lines = []
    paths = sorted({x["path"] for x in results})
    groups = [(f"`{path}`", [x for x in results if x["path"] == path]) for path in paths]
    for name, group in [*groups, ("all", list(results))]:
        counts = Counter(map(outcome, group))
        lines.append([name, str(len(group)), *(str(counts[x]) for x in COLUMNS)])
    return pages.table(["module", "mutants", *COLUMNS], lines, texts=1)


def summary(results: Sequence[dict[str, Any]], controls: Sequence[dict[str, Any]]) -> str:
    counts = Counter(map(outcome, results))
    noticed, tried = counts["caught"] + counts["timed out"], len(results) - counts["equivalent"]
    alarms = sum(x["verdict"] != "survived" for x in controls)
    return (
        f"{len(results)} mutants, {noticed} noticed: {100 * noticed / max(1, tried):.1f} % of those that are not "
        f"equivalent, {100 * noticed / max(1, len(results)):.1f} % of all. {len(controls)} controls, runs of the same "
        f"tests without a mutant: {alarms} failed."
    )


def survivors(results: Sequence[dict[str, Any]]) -> str:
    """A line for each mutant that no test noticed and that is not known to be equivalent."""
    return "\n".join(
        f"survived: {x['path']}:{x['place'][1]} {x['place'][0]}: {x['change']} ({x['tests']} tests)"
        for x in results
        if outcome(x) == "survived"
    )
