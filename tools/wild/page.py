"""The table of the report, in Markdown."""

from collections import Counter
from collections.abc import Sequence

from tools.pages import table
from tools.wild.measurement import RIGHT, Row

HEAD = ("project", "what", "value", "encoder gradient", "loss's own parameters", "uneven shards change", "diagnosis")


def counts(rows: Sequence[Row]) -> str:
    """Return in a sentence how many rows ran, and how they came out."""
    ran = [row for row in rows if not row.why_not]
    by_verdict = Counter(row.verdict for row in ran)
    named = ", ".join(f"{count} {name}" for name, count in by_verdict.most_common())
    projects = len({row.project for row in ran})
    return (
        f"{len(ran)} losses of {projects} projects ran, {len(rows) - len(ran)} entries did not. By diagnosis: {named}."
    )


def page(rows: Sequence[Row]) -> str:
    """Return the tables: what ran, the fix of each diagnosis, and why the others did not run."""
    ran = [row for row in rows if not row.why_not]
    order = sorted(ran, key=lambda row: (row.verdict == RIGHT, row.project.lower()))
    lines = [[_where(row), row.about, row.value, row.encoder, row.parameters, row.uneven, row.verdict] for row in order]
    fixes = {row.verdict: row.fix for row in ran if row.fix}
    others = [[_where(row), row.about, row.why_not] for row in rows if row.why_not]
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
    line = f"#L{row.line}" if row.line else ""
    path = f"https://github.com/{row.project}/blob/{row.commit}/{row.file}{line}"
    return f"[{row.project}]({path}) {row.commit}, {row.file.rpartition('/')[2]}:{row.line}"
