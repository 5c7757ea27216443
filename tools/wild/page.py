"""The table of the report, in Markdown."""

from collections import Counter
from collections.abc import Sequence

from tools.pages import table
from tools.wild.measurement import RIGHT, Row

HEAD = ("project", "what", "value", "encoder gradient", "loss's own parameters", "uneven shards change", "diagnosis")
FAILURES = ("raises", "hangs", "process dies")


def counts(rows: Sequence[Row]) -> str:
    """Return how many losses ran, how they came out on equal and on uneven shards, and the names of their mistakes."""
    ran = [row for row in rows if not row.why_not]
    equal = [row for row in ran if "**" in row.value + row.encoder + row.parameters]
    ended = [row for row in ran if any(failure in row.uneven for failure in FAILURES)]
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
    lines = [
        [_where(row), row.entry.about, row.value, row.encoder, row.parameters, row.uneven, row.verdict] for row in order
    ]
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
