"""Print the report of an audit: a table, the mistakes and their fixes, and the verdict."""

from __future__ import annotations

import math

from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from contrastive_zoo.testing.auditing.comparison import Quantity
from contrastive_zoo.testing.auditing.mistakes import MISTAKES
from contrastive_zoo.testing.auditing.report import VERDICTS, AuditReport, WorldReport

_ANSWERS = {True: Text("yes", "green"), False: Text("no", "bold red"), None: Text("not compared", "yellow")}
_STYLES = {True: "green", False: "bold red", None: "yellow"}


def show(report: AuditReport, console: Console | None = None) -> None:
    """Print a report."""
    console = console or Console()
    for world in report.worlds:
        _show_world(world, console)
    console.print(Text(f"{report.name}: {VERDICTS[report.ok]}.", _STYLES[report.ok]))


def _show_world(world: WorldReport, console: Console) -> None:
    losses = f", {', '.join(dict.fromkeys(world.losses))}" if world.losses else ""
    console.print(Text(f"{world.world_size} processes, {world.steps} steps{losses} ({world.seconds:.1f} s)", "bold"))
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("compared with one process", "the same", "ratio", "cosine", "error", "tolerance"):
        table.add_column(heading, justify="left" if heading in ("compared with one process", "the same") else "right")
    for quantity in world.quantities:
        table.add_row(*_row(quantity))
    console.print(table)
    for reason in dict.fromkeys(x.reason for x in world.quantities if x.ok is None):
        console.print(Padding(Text(f"Not compared: {reason}.", "yellow"), (0, 0, 0, 2)))
    if world.problem:
        console.print(Text(world.problem, "yellow"))
    for finding in world.findings:
        mistake = MISTAKES[finding.mistake]
        text = Text.assemble(
            mistake.why, "\n", ("Measured: ", "bold"), finding.measured, "\n", ("Fix: ", "bold"), mistake.fix
        )
        console.print(Panel(text, title=mistake.mistake, title_align="left"))
    for note in world.notes:
        console.print(Padding(Text(f"Note: {note}.", "dim"), (0, 0, 0, 2)))


def _row(x: Quantity) -> tuple[str | Text, ...]:
    if x.ratio is None:
        return x.name, _ANSWERS[None]
    answer = Text("see note", "dim") if x.is_noted else _ANSWERS[x.ok]
    numbers = (f"{x.ratio.ratio:.4g}", f"{x.ratio.cosine:.4f}", _error(x.ratio.error), f"{x.tolerance:.0e}")
    return x.name, answer, *numbers


def _error(x: float) -> str:
    return f"{x:.1%}" if math.isfinite(x) and x >= 0.001 else f"{x:.0e}"
