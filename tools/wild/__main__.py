"""Run the doctor on the loss code of public trainers: ``python -m tools.wild FOLDER [--docs] [--only NAME]``.

FOLDER holds clones that are named owner+name. Their code is loaded by file and runs only in the ranks of this program.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from contrastive_zoo.testing.worlds import Worlds
from tools.pages import PAGES, fill, table
from tools.wild.measurement import RIGHT, Row, measured
from tools.wild.projects import entries

HEAD = ("project", "what", "value", "encoder gradient", "loss's own parameters", "uneven shards change", "diagnosis")
FAILURES = ("raises", "hangs", "process dies")


def counts(rows: Sequence[Row]) -> str:
    """Return how many losses ran, how they came out on equal and on uneven shards, and the names of their mistakes."""
    ran = [row for row in rows if not row.why_not]
    equal = [row for row in ran if "**" in "".join(row.columns[:3])]
    ended = [row for row in ran if any(failure in row.columns[3] for failure in FAILURES)]
    right = [row for row in ran if row.verdict == RIGHT]
    mistakes = Counter(row.verdict for row in ran if row.verdict != RIGHT)
    lines = [
        f"{_number(ran)} ran; {len(rows) - len(ran)} entries did not.",
        "",
        f"- wrong on equal shards: {_number(equal)}",
        f"- raise, hang or end a process on uneven shards: {_number(ended)}",
        f"- right: {_number(right)}",
        f"- diagnoses: {', '.join(f'{count} {name}' for name, count in mistakes.most_common())}",
    ]
    return "\n".join(lines)


def _number(rows: Sequence[Row]) -> str:
    return f"{len(rows)} losses of {len({row.entry.project for row in rows})} projects"


def page(rows: Sequence[Row]) -> str:
    """Return the tables: what ran, the fix of each diagnosis, and why the others did not run."""
    ran = [row for row in rows if not row.why_not]
    order = sorted(ran, key=lambda row: (row.verdict == RIGHT, row.entry.project.lower()))
    lines = [[_where(row), row.entry.about, *row.columns, row.verdict] for row in order]
    fixes = {row.verdict: row.fix for row in ran if row.fix}
    others = [[_where(row), row.entry.about, row.why_not] for row in rows if row.why_not]
    return "\n\n".join(
        [
            counts(rows),
            table(HEAD, lines, texts=len(HEAD)),
            "## The fixes",
            table(("diagnosis", "fix"), [[name, fixes[name]] for name in sorted(fixes)]),
            "## What did not run",
            table(("project", "what", "why"), others, texts=3),
        ]
    )


def _where(row: Row) -> str:
    """Return a link to the line at its commit."""
    file, line = row.entry.file, f"#L{row.line_number}" if row.line_number else ""
    path = f"https://github.com/{row.entry.project}/blob/{row.commit}/{file}{line}"
    return f"[{row.entry.project}]({path}) {row.commit}, {file.rpartition('/')[2]}:{row.line_number}"


def main() -> None:
    """Measure all entries, print a line for each, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder of clones")
    parser.add_argument("--docs", action="store_true", help="write docs/pages/in-the-wild.md")
    parser.add_argument("--only", default="", help="part of the names of entries to run")
    options = parser.parse_args()
    rows = []
    with Worlds(timeout=6.0, grace=0.3) as worlds:
        for entry in entries():
            if options.only in entry.name:
                row = measured(entry, options.folder, worlds)
                print(f"{entry.name}: {row.verdict or row.why_not}", flush=True)
                rows.append(row)
    print(counts(rows))
    if options.docs:
        fill(PAGES / "in-the-wild.md", {"wild": page(rows)})


if __name__ == "__main__":
    main()
