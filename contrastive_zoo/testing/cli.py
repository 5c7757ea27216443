"""The command line: ``contrastive-zoo check``, ``audit`` and ``explain``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from contrastive_zoo.ranks.suggestions import needed
from contrastive_zoo.testing.interrupts import uninterrupted

with needed("the command contrastive-zoo", "contrastive_zoo[cli,testing]"):
    import typer

if TYPE_CHECKING:
    from contrastive_zoo.testing.report import AuditReport, Report

ABOUT = "Check that a contrastive loss or training gives the same numbers on several processes as on one."
app = typer.Typer(help=ABOUT, no_args_is_help=True, pretty_exceptions_show_locals=False)


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
Target = Annotated[
    str, typer.Argument(help="A loss of contrastive_zoo, module:LossClass, or module:function that returns a loss.")
]
Settings = Annotated[list[str] | None, typer.Option("--set", help="name=value for the loss; repeat the option.")]
WorldSizes = Annotated[list[int] | None, typer.Option("--world-size", "-W", help="Numbers of processes: -W 1 2 4.")]


@app.command()
def check(
    target: Target,
    world_size: WorldSizes = None,
    examples: Annotated[int, typer.Option(help="Number of global batches to test.", min=1)] = 30,
    trainer: Annotated[
        Literal["mean", "sum"], typer.Option(help="How the trainer reduces gradients over ranks.")
    ] = "mean",
    call: Annotated[str, typer.Option(help="Call form of the loss: labels, views, or auto.")] = "auto",
    timeout: Annotated[float, typer.Option(help="Seconds for a global batch after the first call.", min=0.1)] = 4.0,
    width: Annotated[int | None, typer.Option(help="Width of the embeddings, where the loss fixes it.", min=1)] = None,
    threads: Annotated[
        bool,
        typer.Option("--threads", help="Run ranks as threads of this process, up to 64; a debugger works in them."),
    ] = False,
    setting: Settings = None,
    wrap: Annotated[bool, typer.Option("--wrap", help="Check DistributedLoss(loss) instead of the loss.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Check whether a loss has the same value and gradients on several processes as on one, and name the mistake if not.

    Exit status: 0 if they are the same, 1 if not, 2 if the loss could not be checked.
    """
    with uninterrupted():
        from contrastive_zoo.testing.check import examine
        from contrastive_zoo.testing.check_target import find_target

    sys.path.insert(0, os.getcwd())
    with _output_for_json(json_file):
        make, name, call_form = find_target(target, dict(map(_setting, setting or [])), wrap)
        try:
            report = examine(
                make,
                world_sizes=world_size or (1, 2, 3, 4),
                call=call_form if call == "auto" and call_form else call,
                grad_reduction=trainer,
                max_examples=examples,
                width=width,
                timeout=timeout,
                threads=threads,
                name=name,
            )
        except Exception as error:  # exit status 1 is for a verdict
            typer.echo(f"{name}: could not be checked. {str(error).partition(chr(10))[0]}", err=True)
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

    Exit status: 0 if the training is the same, 1 if it is not, 2 if that is not known.
    """
    with uninterrupted():
        from contrastive_zoo.testing.auditing.launch import audit_script

    command = [*(["-m", module] if module else []), *(script or [])]
    try:
        report = audit_script(
            command, world_sizes=world_size or (2,), nodes=nodes, steps=steps, losses=loss or [], timeout=timeout
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(_shown(report, json_file))


SEVERAL = 32  # tokens, candidates or views of a sample in a call that is explained


@app.command("explain")
def explain_step(
    target: Target,
    rows: Annotated[int, typer.Option(help="Samples of each process.", min=1)] = 256,
    width: Annotated[int, typer.Option(help="Features of an embedding.", min=1)] = 128,
    world_size: Annotated[int, typer.Option("--world-size", "-W", help="Number of processes.", min=1)] = 1,
    device: Annotated[str, typer.Option(help="What computes: cpu or cuda; neither has to be there.")] = "cpu",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "float64"], typer.Option(help="Precision of the embeddings.")
    ] = "float32",
    call: Annotated[str, typer.Option(help="Call form of a loss from elsewhere: labels or views.")] = "views",
    ring: Annotated[bool, typer.Option("--ring", help="Pass candidates from rank to rank.")] = False,
    setting: Settings = None,
) -> None:
    """Show which path a step takes, and its messages, bytes, matmuls and memory, without computing it.

    Exit status: 0, or 2 if the loss refuses such a call.
    """
    with uninterrupted():
        import torch

        import contrastive_zoo
        from contrastive_zoo.testing.catalogue import find_entry
        from contrastive_zoo.testing.check_target import find_target

    shapes: dict[str, tuple[int, ...]] = {"rows": (rows, width), "several": (rows, SEVERAL, width)}
    shapes |= {"negatives": (rows, width), "several scores": (rows, SEVERAL), "hierarchy": (rows, SEVERAL)}
    sys.path.insert(0, os.getcwd())
    settings, entry = dict(map(_setting, setting or [])), find_entry(target)
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
        of = dict.fromkeys(("labels", "binary", "hierarchy", "counts"), torch.int64)
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


def _shown(report: Report | AuditReport, json_file: Path | None) -> int:
    """Print a report, write it as JSON if a file is given, and return the exit status."""
    if str(json_file) != "-":
        typer.echo(report)
    if json_file is not None:
        with json_file.open("w") if str(json_file) != "-" else nullcontext(sys.stdout) as stream:
            print(json.dumps(report.as_dict(), indent=2), file=stream)
    return report.status


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
    app(_repeat_option(sys.argv[1:]))


def _repeat_option(arguments: list[str]) -> list[str]:
    """Turn ``--world-size 1 2`` before -- into ``--world-size 1 --world-size 2``, which typer accepts."""
    repeated: list[str] = []
    for argument in arguments:
        follows_number = len(repeated) > 1 and repeated[-2] in ("--world-size", "-W") and argument.isdigit()
        repeated += [repeated[-2], argument] if follows_number and "--" not in repeated else [argument]
    return repeated
