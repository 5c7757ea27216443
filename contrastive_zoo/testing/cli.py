"""The command line: ``contrastive-zoo check``, ``audit``, ``explain`` and ``list``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from contrastive_zoo.ranks.suggestions import did_you_mean
from contrastive_zoo.testing.interrupts import uninterrupted

try:
    import typer
    from rich.console import Console
    from rich.padding import Padding
    from rich.panel import Panel
    from rich.progress import Progress
    from rich.table import Table
    from rich.text import Text
except ImportError as error:
    raise ImportError(
        "the command contrastive-zoo needs typer and rich: pip install 'contrastive_zoo[cli,testing]'"
    ) from error

if TYPE_CHECKING:
    from contrastive_zoo.testing.catalogue import Entry
    from contrastive_zoo.testing.report import AuditReport, Report

app = typer.Typer(no_args_is_help=True, pretty_exceptions_show_locals=False)


def _show_version(shown: bool) -> None:
    if shown:
        from contrastive_zoo import __version__

        typer.echo(f"contrastive_zoo {__version__}")
        raise typer.Exit


@app.callback()
def commands(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Check and list contrastive losses that are the same function on W processes as on one."""


def _writable(file: Path | None) -> Path | None:
    """Exit, before the check, if a file cannot be written."""
    try:
        if file is not None and str(file) != "-":
            file.open("a").close()
    except OSError as error:
        raise typer.BadParameter(str(error)) from None
    return file


JsonFile = Annotated[
    Path | None,
    typer.Option("--json", help="Write the result to this file as JSON; - for the output.", callback=_writable),
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="name=value for the function or class; repeat the option.")
]
WorldSizes = Annotated[
    list[int] | None, typer.Option("--world-size", "-W", help="Numbers of processes: --world-size 1 2 4.")
]


@app.command()
def check(
    target: Annotated[
        str,
        typer.Argument(help="module:function that returns a loss, module:LossClass, or a name that `list` shows."),
    ],
    world_size: WorldSizes = None,
    examples: Annotated[int, typer.Option(help="Number of global batches to test.", min=1)] = 30,
    trainer: Annotated[
        Literal["mean", "sum"], typer.Option(help="How the trainer reduces gradients over ranks.")
    ] = "mean",
    call: Annotated[str, typer.Option(help="Call form of the loss: labels, views, or auto.")] = "auto",
    level: Annotated[
        Literal["loss", "training-step"],
        typer.Option(help="What the function returns: a loss, or (model, step), a whole training step."),
    ] = "loss",
    timeout: Annotated[
        float, typer.Option(help="Seconds for one global batch, besides those of the first call.", min=0.1)
    ] = 4.0,
    width: Annotated[int | None, typer.Option(help="Width of the embeddings, where the loss fixes it.", min=1)] = None,
    threads: Annotated[
        bool,
        typer.Option("--threads", help="Run ranks as threads of this process, up to 64; a debugger works in them."),
    ] = False,
    setting: Settings = None,
    wrap: Annotated[bool, typer.Option("--wrap", help="Check DistributedLoss(loss) instead of the loss.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Check in seconds whether a loss is the same function on W processes as on one, and diagnose it if it is not.

    Exit status: 0 if it is, 1 if it is not, 2 if the loss could not be checked.
    """
    try:
        with uninterrupted():
            from contrastive_zoo.testing.check import examine
            from contrastive_zoo.testing.check_target import find_target
    except ImportError as error:  # it names the extra that is not installed
        typer.echo(error, err=True)
        raise typer.Exit(2) from None

    sys.path.insert(0, os.getcwd())
    with _output_for_json(json_file):
        make, name, call_form = find_target(target, dict(map(_setting, setting or [])), wrap)
        try:
            with progress(f"checking {name}", examples) as advance:
                report = examine(
                    make,
                    world_sizes=world_size or (1, 2, 3, 4),
                    call=call_form if call == "auto" and call_form else call,
                    grad_reduction=trainer,
                    max_examples=examples,
                    level=level.replace("-", "_"),
                    width=width,
                    timeout=timeout,
                    threads=threads,
                    name=name,
                    on_example=advance,
                )
        except Exception as error:  # exit status 1 is for a verdict
            hint = did_you_mean(call, ("auto", "labels", "views"))
            typer.echo(f"{name}: could not be checked. {str(error).partition(chr(10))[0]}{hint}", err=True)
            raise typer.Exit(2) from None
    raise typer.Exit(_shown(report, json_file))


@app.command(context_settings={"ignore_unknown_options": True})
def audit(
    script: Annotated[
        list[str] | None, typer.Argument(help="The script and its arguments.", metavar="SCRIPT ...")
    ] = None,
    module: Annotated[str | None, typer.Option("-m", help="A module to run instead, as python -m does.")] = None,
    world_size: WorldSizes = None,
    steps: Annotated[int, typer.Option(help="Number of steps of the optimizer to compare.", min=1)] = 3,
    loss: Annotated[
        list[str] | None, typer.Option(help="Class, or module:Class, of a loss that is not known; repeat the option.")
    ] = None,
    nodes: Annotated[int, typer.Option(help="Number of nodes; LOCAL_RANK counts within one.", min=1)] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds for each run of the script.", min=1)] = 300.0,
    json_file: JsonFile = None,
) -> None:
    """Run the first steps of a training script on several processes and compare them with one process.

    The script is not changed. It ends after the steps, before it evaluates or saves. Options after -- are the script's.
    Under torchrun (torchrun --nproc-per-node 2 -m contrastive_zoo audit train.py) as many processes are audited.

    Exit status: 0 if the training is the same, 1 if it is not, 2 if that is not known.
    """
    with uninterrupted():
        from contrastive_zoo.testing.auditing.launch import audit_script, torchrun_processes

    sizes, started = world_size or (2,), torchrun_processes()
    if started == 0:
        raise typer.Exit(0)  # the first process audits as many as torchrun has started
    sizes = sizes if started is None else (started,)
    command = [*(["-m", module] if module else []), *(script or [])]
    try:
        with progress(f"auditing {' '.join(command)}", 2 * len(sizes)) as advance:
            report = audit_script(
                command,
                world_sizes=sizes,
                nodes=nodes,
                steps=steps,
                losses=loss or [],
                timeout=timeout,
                on_run=advance,
            )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(_shown(report, json_file))


SEVERAL = 32  # tokens, candidates or views of a sample in a call that is explained


@app.command("explain")
def explain_step(
    target: Annotated[
        str, typer.Argument(help="A name that `list` shows, module:LossClass, or module:function that returns a loss.")
    ],
    rows: Annotated[int, typer.Option(help="Samples of each process.", min=1)] = 256,
    width: Annotated[int, typer.Option(help="Features of an embedding.", min=1)] = 128,
    world_size: Annotated[int, typer.Option("--world-size", "-W", help="Number of processes.", min=1)] = 1,
    device: Annotated[str, typer.Option(help="What computes: cpu or cuda; neither has to be there.")] = "cpu",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "float64"], typer.Option(help="Precision of the embeddings.")
    ] = "float32",
    call: Annotated[
        str, typer.Option(help="Call form of a loss that `list` does not show: labels or views.")
    ] = "views",
    ring: Annotated[bool, typer.Option("--ring", help="Pass candidates from rank to rank.")] = False,
    setting: Settings = None,
) -> None:
    """Show which path a step takes, and its messages, bytes, matmuls and memory, without computing it.

    Exit status: 0, or 2 if the loss refuses such a call.
    """
    with uninterrupted():
        import torch

        import contrastive_zoo
        from contrastive_zoo.testing.catalogue import CATALOGUE
        from contrastive_zoo.testing.check_target import find_target

    shapes: dict[str, tuple[int, ...]] = {"rows": (rows, width), "several": (rows, SEVERAL, width)}
    shapes |= {"negatives": (rows, width), "several scores": (rows, SEVERAL)}
    sys.path.insert(0, os.getcwd())
    settings, entry = dict(map(_setting, setting or [])), CATALOGUE.get(target)
    kinds = ["rows", "labels" if call == "labels" else "rows"]
    try:
        if entry is None:
            loss = find_target(target, settings, wrap=False)[0]()
        else:
            sizes = {name: width for name in ("embedding_size", "out_dim") if name in entry.settings}
            settings = entry.settings | sizes | settings
            loss, kinds = entry.loss(**settings), [*entry.kinds.values()]
        if not isinstance(loss, contrastive_zoo.DistributedLoss):
            loss = contrastive_zoo.DistributedLoss(loss, ring=ring)
        of = {"labels": torch.int64, "binary": torch.int64}
        tensors = [
            torch.empty(shapes.get(kind, (rows,)), dtype=of.get(kind, torch.float32), device="meta")
            for kind in kinds
            if kind != "token mask"  # all tokens are valid
        ]
        options: dict[str, Any] = {"device": device, "dtype": getattr(torch, dtype)}
        typer.echo(contrastive_zoo.explain(loss, *tensors, world_size=world_size, **options))
    except (TypeError, ValueError) as error:
        typer.echo(error, err=True)
        raise typer.Exit(2) from None


@app.command("list")
def list_losses(
    words: Annotated[
        list[str] | None, typer.Argument(help="Show only losses that contain each of these words.", metavar="WORDS ...")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Show the losses of the zoo, or those whose name, family, call, summary or peers contain some words."""
    with uninterrupted():
        from contrastive_zoo.testing.catalogue import CATALOGUE

    entries = [x for x in CATALOGUE.values() if all(word.lower() in x.text.lower() for word in words or ())]
    if not entries:
        asked = " ".join(words or ())
        raise typer.BadParameter(f"no loss contains {asked!r}.{did_you_mean(asked, CATALOGUE)}")
    if json_file is None:
        show_catalogue(entries)
    else:
        _write({"losses": [x.as_dict() for x in entries]}, json_file)


_ANSWERS = {True: "yes", False: "no", None: "not compared"}
_STYLES = {True: "green", False: "bold red", None: "yellow"}


@contextmanager
def _output_for_json(json_file: Path | None) -> Iterator[None]:
    """Context manager: all that is printed goes to stderr, by ranks too, if the output is to be JSON."""
    if str(json_file) != "-":
        yield
        return
    sys.stdout.flush()
    output = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(output, 1)
        os.close(output)


@contextmanager
def progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar; yield a function that sets the number of completed items."""
    with Progress(transient=True, console=Console(stderr=True)) as bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.update(task, completed=done)


def show(report: Report | AuditReport) -> None:
    console = Console()
    for section in report.sections():
        console.print(Text(f"{section.title} ({section.seconds:.1f} s)", "bold"))
        # numbers fit into columns; the text of a counterexample stands below the table
        headings = section.headings if len(section.headings) > 3 else section.headings[:2]
        table = Table(*headings, box=None, padding=(0, 1, 0, 0))
        table.columns[0].no_wrap = True
        for name, holds, measured in section.rows:
            answer = Text(holds, "dim") if isinstance(holds, str) else Text(_ANSWERS[holds], _STYLES[holds])
            table.add_row(name, answer, *(Text(x) for x in measured[: len(headings) - 2]))
        if section.rows:
            console.print(table)
        for name, _, measured in section.rows if len(headings) == 2 else ():
            for example in measured:
                console.print(Padding(Text(f"{name}: {example}"), (0, 0, 0, 2)))
        for problem in section.problems:
            console.print(Padding(Text(problem, "yellow"), (0, 0, 0, 2)))
        for x in section.diagnoses:
            titled = [("\n", (f"{title}: ", "bold"), text) for title, text in (x.details() | {"Fix": x.fix}).items()]
            words = Text.assemble(x.why, *(part for parts in titled for part in parts))
            console.print(Panel(words, title=x.mistake, title_align="left"))
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


def _shown(report: Any, json_file: Path | None) -> int:
    """Print a report, write it as JSON if a file is given, and return the exit status."""
    if str(json_file) != "-":
        show(report)
    if json_file is not None:
        _write(report.as_dict(), json_file)
    return int(report.status)


def _write(result: dict[str, Any], file: Path) -> None:
    """Write a result as JSON to a file, or to the output."""
    with file.open("w") if str(file) != "-" else nullcontext(sys.stdout) as stream:
        print(json.dumps(result, indent=2), file=stream)


def _setting(text: str) -> tuple[str, Any]:
    """Parse ``name=value``; the value is JSON, a number as Python writes it, such as .2, or else a string."""
    name, separator, value = text.partition("=")
    if not separator:
        raise typer.BadParameter(f"--set takes name=value, got {text!r}.")
    for parse in (json.loads, float):
        with suppress(ValueError):
            return name, parse(value)
    return name, value


def main() -> None:
    """Run the console script."""
    app(_repeat_option(sys.argv[1:]))


def _repeat_option(arguments: list[str]) -> list[str]:
    """Turn ``--world-size 1 2 4`` into ``--world-size 1 --world-size 2 --world-size 4``, which typer accepts."""
    repeated: list[str] = []
    for argument in arguments:
        follows_number = len(repeated) > 1 and repeated[-2] in ("--world-size", "-W") and argument.isdigit()
        repeated += [repeated[-2], argument] if follows_number else [argument]
    return repeated


if __name__ == "__main__":
    main()
