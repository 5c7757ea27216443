"""A demonstration: the same training on one process and on two, on scikit-learn's digits, with three losses.

One process and two processes with uneven shards of every batch end with the same parameters, up to rounding in float64.
Two common hand-written gathers do not.
"""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from contrastive_zoo.testing.worlds import Worlds
from examples.demo import pictures
from examples.demo.recipes import CROSS_VIEW, RIGHT, SUP_CON, WRONG, Job, Rows
from examples.demo.training import SHARES, Comparison, Digits, Trained, run

TOLERANCE = 1e-9  # largest difference between parameters that counts as rounding, in float64


def demo(output: Path, console: Console | None = None) -> dict[str, Any]:
    """Train all jobs, compare them with one process, print a table, and draw two pictures into the folder.

    Return what was compared in plain types: ``ok``, whether every right job ended with the same parameters on one process
    and on two, and the differences of the ``right`` and the ``wrong`` jobs.
    """
    output.mkdir(parents=True, exist_ok=True)
    TemporaryFile(dir=output).close()  # a folder that is not writable is found before the training
    console = console or Console()
    digits = Digits.load()
    right, wrong = compare(digits, console)
    console.print()
    console.print(_table(right, wrong, digits))
    console.print()
    by_title = {comparison.job.title: comparison for comparison in right}
    pictures.training_curves(by_title[CROSS_VIEW.title], wrong, output / "training_curves.png")
    pictures.embeddings(by_title[SUP_CON.title], digits, output / "embeddings.png")
    agree = _verdict(right, console)
    console.print("Pictures: training_curves.png and embeddings.png, in this folder:")
    console.print(str(output.resolve()), soft_wrap=True, highlight=False)  # on one line, to be copied
    return {"ok": agree, "folder": str(output), "right": _differences(right), "wrong": _differences(wrong)}


def _differences(comparisons: tuple[Comparison, ...]) -> dict[str, dict[str, float]]:
    return {
        x.job.title: {"difference": x.difference, "difference_between_ranks": x.difference_between_ranks}
        for x in comparisons
    }


def compare(
    digits: Digits, console: Console, steps: int | None = None
) -> tuple[tuple[Comparison, ...], tuple[Comparison, ...]]:
    """Run right jobs on one process and on two, then wrong recipes on two, with a progress bar for each.

    Every job has so many steps, or its own number of them.
    """
    right, wrong = ([replace(job, steps=steps or job.steps) for job in jobs] for jobs in (RIGHT, WRONG))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Worlds(threads=1) as worlds, Progress(*columns, console=console) as progress:

        def trained(job: Job, world_size: int) -> tuple[Trained, ...]:
            processes = "1 process" if world_size == 1 else f"{world_size} processes"
            bar = progress.add_task(f"{job.title}, {processes}", total=job.steps)
            return run(job, world_size, digits, worlds, lambda step: progress.update(bar, completed=step))

        done = tuple(Comparison(job, trained(job, 1)[0], trained(job, 2)) for job in right)
        reference = done[0].one_process  # the wrong recipes are variants of the first job
        return done, tuple(Comparison(job, reference, trained(job, 2)) for job in wrong)


def _table(right: tuple[Comparison, ...], wrong: tuple[Comparison, ...], digits: Digits) -> Table:
    def recall(comparison: Comparison, rows: Rows) -> str:
        return f"{100 * comparison.recall(rows, digits):.1f}"

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))  # 80 columns at most
    for heading in ("loss", "trainer"):
        table.add_column(heading, no_wrap=True, vertical="bottom")
    for heading in ("held-out\nloss, W=1", "R@1 in %\nW=1", "\nW=2", "max.\ndiff."):
        table.add_column(heading, justify="right", no_wrap=True)
    for c in right:
        loss = f"{c.one_process.curve[0]:.2f} → {c.one_process.curve[c.job.steps]:.2f}"
        learnt = f"{recall(c, c.one_process.before)} → {recall(c, c.one_process.after)}"
        difference = f"[{'green' if c.difference <= TOLERANCE else 'red'}]{c.difference:.0e}"
        table.add_row(c.job.title, c.job.trainer, loss, learnt, recall(c, c.two_processes[0].after), difference)
    table.add_section()
    for c in wrong:
        name = f"[red]✗[/] {c.job.title}"
        table.add_row(name, c.job.trainer, "", "", recall(c, c.two_processes[0].after), f"[red]{c.difference:.0e}")
    table.caption = "max. diff.: of a parameter, between W=2 and W=1.  ✗: wrong hand-written gather"
    return table


def _verdict(right: tuple[Comparison, ...], console: Console) -> bool:
    shares = " + ".join(f"{share:.0%}" for share in SHARES[2])
    failed = [c for c in right if not (c.difference <= TOLERANCE and c.difference_between_ranks == 0)]  # NaN, too
    for c in failed:
        console.print(
            f"[bold red]FAILED[/] {c.job.title}: W=2 ({shares} of every batch) differs from W=1 by {c.difference:.1e}, "
            f"allowed is {TOLERANCE:.0e}; its ranks differ by {c.difference_between_ranks:.1e}, allowed is 0."
        )
    if not failed:
        largest = max(c.difference for c in right)
        console.print(
            f"[bold green]Same training.[/] Two processes with {shares} of every batch (W=2) end with the parameters of one "
            f"process (W=1): largest difference {largest:.0e}, allowed is {TOLERANCE:.0e}; between the two ranks 0."
        )
    return not failed
