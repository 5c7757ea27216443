"""Notebooks and pages: execute the notebooks of the examples (``python -m tools.notebook``), or turn one into the other."""

import re
from pathlib import Path
from typing import Any

import nbformat

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))

_BLOCK = re.compile(r'^```(?:\{ \.)?(\w+)(?: title="([\w.]+)")?[^\n]*\n(.*?)^```\n', re.MULTILINE | re.DOTALL)
_SNIPPET = re.compile(r'^--8<-- "([\w/.]+)"\n', re.MULTILINE)
_TABS = re.compile(r"^## [^\n]*\{ #trainers \}\n.*?(?=^## )", re.MULTILINE | re.DOTALL)


def execute(path: Path) -> None:
    """Run all cells of a notebook in a new kernel, and write it with their outputs and without times."""
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    how: Any = {"kernel_name": "python3", "resources": {"metadata": {"path": str(ROOT)}}}
    how["coalesce_streams"] = True  # outputs are one text, in whatever pieces they came
    NotebookClient(notebook, timeout=120, **how).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    nbformat.write(notebook, path)


def as_page(path: Path) -> str:
    """Return a notebook with its outputs as Markdown."""
    parts = []
    for cell in nbformat.read(path, as_version=4).cells:
        parts.append(cell.source if cell.cell_type == "markdown" else f"```python\n{cell.source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(f"![Output of the cell](data:image/png;base64,{data['image/png'].strip()})")
            else:
                parts.append(f"```text\n{output.get('text', data.get('text/plain', '')).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def with_snippets(markdown: str) -> str:
    return _SNIPPET.sub(lambda x: (ROOT / x[1]).read_text(encoding="utf-8"), markdown)


def as_notebook(page: str) -> Any:
    """Return a page as a notebook: a block with a title writes that file, a block of commands runs them.

    Examples:
        >>> [cell.source for cell in as_notebook('Run it:\\n\\n```sh\\npython x.py\\n```\\n').cells]
        ['Run it:', '!python x.py']
    """
    cells, at, page = [], 0, with_snippets(_TABS.sub("", page))
    for block in _BLOCK.finditer(page):
        kind, title, text = block.groups()
        if words := page[at : block.start()].strip():
            cells.append(nbformat.v4.new_markdown_cell(words))
        if title:
            cells.append(nbformat.v4.new_code_cell(f"%%writefile {title}\n{text.rstrip()}"))
        elif kind == "sh":
            commands = (re.sub(r"^([A-Z]+=\w+ )?", r"!\1", line) for line in text.splitlines())
            cells.append(nbformat.v4.new_code_cell("\n".join(commands)))
        else:
            cells[-1].outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)]
        at = block.end()
    cells.append(nbformat.v4.new_markdown_cell(page[at:].strip())) if page[at:].strip() else None
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"  # the same at each build
    return nbformat.v4.new_notebook(cells=cells)


if __name__ == "__main__":
    for notebook in NOTEBOOKS:
        execute(notebook)
