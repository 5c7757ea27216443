"""How the command line shows things: progress, a report, the catalogue."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from contrastive_zoo.catalogue import Species
    from contrastive_zoo.testing.check import Report


_VERDICTS = {True: Text("yes", "green"), False: Text("no", "bold red"), None: Text("not tried", "dim")}


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar; call what it yields with the number done so far."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def show(report: "Report") -> None:
    """A report as a table by law, the verdict, the diagnosis and the mend."""
    from contrastive_zoo.testing.laws import LAWS

    console = Console()
    broken = {found.law.name: found for found in report.findings}
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("law", "holds", "smallest batch on which it does not"):
        table.add_column(heading)
    for law in LAWS:
        found = broken.get(law.name)
        verdict = _VERDICTS[report.holds(law)]
        table.add_row(law.name, verdict, Text("" if found is None else f"{found.batch}\n{found.message}"))
    console.print(table)
    console.print()
    sizes = ", ".join(map(str, report.world_sizes))
    tried = f"{report.examples} global batches on W = {sizes}, in {report.seconds:.1f} s"
    if report.diagnosis is None:
        console.print(
            Text.assemble((f"{report.name} is the same function on any number of processes", "green"), f" ({tried}).")
        )
        return
    console.print(
        Text.assemble((f"{report.name} is not the same function on any number of processes", "red"), f" ({tried}).")
    )
    text = Text.assemble(report.diagnosis.why, "\n\n", ("Mend: ", "bold"), report.diagnosis.mend)
    console.print(Panel(text, title=report.diagnosis.mistake, title_align="left"))


def show_catalogue(rows: Iterable["Species"]) -> None:
    """The losses of the zoo as a table."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("name", "class", "called with", "family", "engine", "source"):
        table.add_column(heading)
    for species in rows:
        table.add_row(species.name, species.cls, species.called_with, species.family, species.engine, species.source)
    Console().print(table)
