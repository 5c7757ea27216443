"""Compare every loss of pytorch-metric-learning under DistributedLoss with the same loss on one process.

``python -m tools.pml_matrix`` prints what differs, and how many cases it compared: every loss, miner, reducer, distance and
regularizer that the library exports. ``BUILT`` holds constructors of what has required arguments, ``BASES`` the exports that
are not compared. An export that is in neither and cannot be constructed without arguments is an error.
"""

from collections.abc import Mapping, Sequence

from contrastive_zoo.testing.worlds import Worlds
from tools.comparison import Compared, Run, measure
from tools.pml_matrix.cases import Case, all_runs, cases

Rows = Sequence[tuple[Case, Mapping[Run, Compared]]]


def verdict(case: Case, compared: Mapping[Run, Compared]) -> tuple[str, str]:
    """Return "✗" and what differs, "–" and why the library has no such case on one process, or "✓"."""
    for run, of in compared.items():
        if wrong := of.wrong(case.tolerance):
            return "✗", f"{case}, shards {list(run.steps[0])}: {wrong}"
    unsupported = case.inapplicable or next((x.unsupported for x in compared.values() if x.unsupported), None)
    return ("✓", "") if unsupported is None else ("–", " ".join(unsupported.split())[:160])


def main() -> None:
    with Worlds() as worlds:
        rows = measure(worlds, cases(), all_runs)
    different = [why for mark, why in (verdict(*row) for row in rows) if mark == "✗"]
    print(*different, sep="\n")
    print(f"{len(rows)} cases, {sum(len(of) for _, of in rows)} comparisons, {len(different)} different")


if __name__ == "__main__":
    main()
