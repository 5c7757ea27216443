"""Print the output of the command line: progress, the report of a check, the catalogue."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from contrastive_zoo.testing.catalogue import Entry
    from contrastive_zoo.testing.check import Report


_VERDICTS = {True: Text("yes", "green"), False: Text("no", "bold red"), None: Text("not tried", "dim")}


@contextmanager
def progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar; yield a function that sets the number of completed items."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.update(task, completed=done)


def show(report: "Report") -> None:
    """Print a report: a table of invariants, the verdict, the diagnosis and the fix."""
    from contrastive_zoo.testing.invariants import INVARIANTS
    from contrastive_zoo.testing.report import processes

    console = Console()
    findings = {finding.invariant.name: finding for finding in report.findings}
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("invariant", "holds", "smallest batch that breaks it"):
        table.add_column(heading)
    for invariant in INVARIANTS:
        finding = findings.get(invariant.name)
        verdict = _VERDICTS[report.holds(invariant)]
        table.add_row(invariant.name, verdict, Text("" if finding is None else f"{finding.batch}\n{finding.message}"))
    console.print(table)
    console.print()
    extent = f"{report.examples} global batches on {processes(report.world_sizes)}, in {report.seconds:.1f} s"
    if report.diagnosis is None:
        console.print(
            Text.assemble((f"{report.name} is the same function on any number of processes", "green"), f" ({extent}).")
        )
        return
    console.print(
        Text.assemble((f"{report.name} is not the same function on any number of processes", "red"), f" ({extent}).")
    )
    text = Text.assemble(report.diagnosis.why, "\n\n", ("Fix: ", "bold"), report.diagnosis.fix)
    console.print(Panel(text, title=report.diagnosis.mistake, title_align="left"))


def show_catalogue(entries: Iterable["Entry"]) -> None:
    """Print the catalogue as a table."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("name", "class", "called with", "family", "engine", "source"):
        table.add_column(heading)
    for entry in entries:
        table.add_row(entry.name, entry.cls, entry.called_with, entry.family, entry.engine, entry.source)
    Console().print(table)
