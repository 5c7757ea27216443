"""Compare every loss of pytorch-metric-learning under DistributedLoss with the same loss on one process, in a table.

``python -m tools.pml_matrix --docs`` measures and writes docs/pages/pytorch-metric-learning.md.

The table covers every loss, miner, reducer, distance and regularizer that the library exports. ``BUILT`` holds constructors
of what has required arguments, ``BASES`` the exports that are not compared. An export that is in neither and cannot be
constructed without arguments is a row with the error.
"""

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version

import torch
from pytorch_metric_learning import losses

from contrastive_zoo.testing.worlds import Worlds
from tools.comparison import Compared, Run, measure
from tools.pages import PAGES, fill
from tools.pml_matrix.cases import BASES, COLUMNS, Case, all_runs, cases, parts

Rows = Sequence[tuple[Case, Mapping[Run, Compared]]]


def verdict(case: Case, compared: Mapping[Run, Compared]) -> tuple[str, str]:
    """Return "✗" and what differs, "–" and why the library has no such case on one process, or "✓"."""
    for run, of in compared.items():
        if wrong := of.wrong(case.tolerance):
            return "✗", f"{case}, shards {list(run.steps[0])}: {wrong}"
    unsupported = case.inapplicable or next((x.unsupported for x in compared.values() if x.unsupported), None)
    return ("✓", "") if unsupported is None else ("–", " ".join(unsupported.split()).replace("|", "/")[:160])


def page(rows: Rows) -> str:
    verdicts = {case: verdict(case, compared) for case, compared in rows}

    def cell(loss: str, column: str) -> str:
        counts = Counter(verdicts[case][0] for case in COLUMNS[column](loss))
        return ", ".join(f"{mark} {counts[mark]}" for mark in "✓–✗" if counts[mark])

    measured = [(run.steps[0], of.wrong(case.tolerance)) for case, compared in rows for run, of in compared.items()]
    by_split, wrong = Counter(x for x, _ in measured), Counter(x for x, why in measured if why)
    reasons = Counter(why for mark, why in verdicts.values() if mark == "–")
    return "\n".join(
        [
            f"pytorch-metric-learning {version('pytorch-metric-learning')}, torch {torch.__version__.split('+')[0]}.",
            "",
            "| W | samples by rank | compared | different |",
            "|---|---|---|---|",
            *(f"| {len(x)} | {list(x)} | {by_split[x]} | {wrong[x]} |" for x in sorted(by_split, key=len)),
            "",
            "Number of cases: ✓ equal to one process; – not supported by the library on one process, and the same error on "
            "every rank; ✗ different.",
            "",
            f"| loss | {' | '.join(COLUMNS)} |",
            f"|---|{'---|' * len(COLUMNS)}",
            *(f"| {loss} | {' | '.join(cell(loss, column) for column in COLUMNS)} |" for loss in parts(losses)),
            "",
            *(f"- ✗ {why}" for mark, why in verdicts.values() if mark == "✗"),
            '<details markdown="1">',
            "<summary>Why the library does not support a case, and of how many</summary>",
            "",
            *(f"- {count} × {why}" for why, count in reasons.most_common()),
            "",
            "</details>",
            "",
            "Exported, but not compared:",
            "",
            *(f"- `{name}`: {why}." for name, why in BASES.items()),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", action="store_true", help="write the page")
    docs = parser.parse_args().docs
    with Worlds() as worlds:
        rows = measure(worlds, cases(), all_runs)
    different = [why for mark, why in (verdict(*row) for row in rows) if mark == "✗"]
    print(*different, sep="\n")
    print(f"{len(rows)} cases, {sum(len(of) for _, of in rows)} comparisons, {len(different)} different")
    if docs:
        fill(PAGES / "pytorch-metric-learning.md", {"matrix": page(rows)})


if __name__ == "__main__":
    main()
