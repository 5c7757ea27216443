"""Print the output of the command line: progress, the report of a check or an audit, the catalogue."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from contrastive_zoo.testing.catalogue import Entry
    from contrastive_zoo.testing.report import AuditReport, Report

_ANSWERS = {True: "yes", False: "no", None: "not compared"}
_STYLES = {True: "green", False: "bold red", None: "yellow"}


@contextmanager
def progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar; yield a function that sets the number of completed items."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.update(task, completed=done)


def show(report: Report | AuditReport, console: Console | None = None) -> None:
    """Print a report: tables, the mistakes and their fixes, and the verdict."""
    console = console or Console()
    for section in report.sections():
        console.print(Text(section.title, "bold"))
        table = _table(section.headings)
        for name, holds, measured in section.rows:
            answer = Text(holds, "dim") if isinstance(holds, str) else Text(_ANSWERS[holds], _STYLES[holds])
            table.add_row(name, answer, *(Text(x) for x in measured))
        console.print(table)
        for problem in section.problems:
            console.print(Padding(Text(problem, "yellow"), (0, 0, 0, 2)))
        for x in section.diagnoses:
            numbers = Text.assemble("\n", ("Measured: ", "bold"), x.measured) if x.measured else ""
            text = Text.assemble(x.why, numbers, "\n", ("Fix: ", "bold"), x.fix)
            console.print(Panel(text, title=x.mistake, title_align="left"))
        for note in section.notes:
            console.print(Padding(Text(f"Note: {note}.", "dim"), (0, 0, 0, 2)))
    console.print(Text(report.verdict, _STYLES[report.ok]))


def show_catalogue(entries: Iterable[Entry]) -> None:
    """Print the catalogue as a table."""
    table = _table(("name", "class", "called with", "family", "engine", "source"))
    for entry in entries:
        table.add_row(entry.name, entry.cls, entry.called_with, entry.family, entry.engine, entry.source)
    Console().print(table)


def _table(headings: Iterable[str]) -> Table:
    return Table(*headings, box=None, padding=(0, 2, 0, 0))
