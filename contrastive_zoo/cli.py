"""The command line: ``contrastive-zoo demo``."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

try:
    import typer
except ImportError as error:
    raise ImportError("contrastive-zoo's commands need typer and rich: pip install contrastive_zoo[cli]") from error

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)


@app.callback()
def commands() -> None:
    """Any contrastive or metric-learning loss, the same function on W processes as on one."""


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder for the pictures.", file_okay=False)] = Path("demo-output"),
) -> None:
    """Train three losses on one process and on two, and show that it is the same training. Takes under a minute."""
    needed = ("cloudpickle", "faiss", "matplotlib", "pytorch_metric_learning", "rich", "sklearn")
    if missing := [name for name in needed if find_spec(name) is None]:
        typer.echo(f"The demo needs {', '.join(missing)}: pip install contrastive_zoo[demo]", err=True)
        raise typer.Exit(1)
    from contrastive_zoo.demo import demo

    raise typer.Exit(0 if demo(output) else 1)


def main() -> None:
    """The console script."""
    app()
