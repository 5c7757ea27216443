"""Execute the notebooks of the examples and store their outputs: ``python -m tools.notebook``."""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def execute(path: Path) -> None:
    """Run all cells of a notebook in a new kernel, and write it with their outputs and without times."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for notebook in NOTEBOOKS:
        execute(notebook)
