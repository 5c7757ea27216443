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
    with Progress(*columns, transient=True, console=Console(stderr=True)) as bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.update(task, completed=done)


def show(report: Report | AuditReport, console: Console | None = None) -> None:
    console = console or Console()
    for section in report.sections():
        console.print(Text(f"{section.title} ({section.seconds:.1f} s)", "bold"))
        table = Table(*section.headings, box=None, padding=(0, 2, 0, 0))
        for name, holds, measured in section.rows:
            answer = Text(holds, "dim") if isinstance(holds, str) else Text(_ANSWERS[holds], _STYLES[holds])
            table.add_row(name, answer, *(Text(x) for x in measured))
        console.print(table)
        for problem in section.problems:
            console.print(Padding(Text(problem, "yellow"), (0, 0, 0, 2)))
        for x in section.diagnoses:
            titled = [("\n", (f"{title}: ", "bold"), text) for title, text in (x.details() | {"Fix": x.fix}).items()]
            text = Text.assemble(x.why, *(part for parts in titled for part in parts))
            console.print(Panel(text, title=x.mistake, title_align="left"))
        for note in section.notes:
            console.print(Padding(Text(f"Note: {note}.", "dim"), (0, 0, 0, 2)))
    console.print(Text(report.verdict, _STYLES[report.ok]))


def show_catalogue(entries: Iterable[Entry]) -> None:
    """Print losses by family, one on a line that fits the terminal."""
    console, family = Console(), ""
    for entry in entries:
        if entry.family != family:
            family = entry.family
            console.print(Text(family, "bold"))
        arguments = Text(entry.called_with)
        arguments.truncate(20, overflow="ellipsis", pad=True)
        line = Text.assemble(f"  {entry.name:<28} ", arguments, f" {entry.summary}")
        console.print(line, no_wrap=True, overflow="ellipsis")
