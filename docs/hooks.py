"""What mkdocs does not know by itself."""

import html as html_module
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.structure.files import File, Files

sys.path.append(str(Path(__file__).parent.parent))  # for tools, which is not installed

from contrastive_zoo.testing.catalogue import CATALOGUE
from tools.docstrings import formula
from tools.formulas import mathml
from tools.llms import first_sentence, with_docstrings
from tools.loss_pages import by_class, path_of
from tools.loss_pages import page as page_of_loss
from tools.notebook import ROOT, as_notebook, as_page, with_snippets
from tools.zoo_page import with_losses

_markdown: dict[str, str] = {}
"""The text of each page by its path, as assistants read it."""

_BLOCK = re.compile(
    r'<div class="(?:language-text )?highlight"><pre><span></span><code>(.*?)</code></pre></div>', re.DOTALL
)


@cache
def _formula_lines() -> frozenset[str]:
    return frozenset(line.strip() for entry in CATALOGUE.values() for line in formula(entry.loss).split("\n"))


def _with_formula(block: re.Match[str]) -> str:
    text = html_module.unescape(re.sub(r"<[^>]+>", "", block[1])).strip("\n")
    is_formula = all(line.strip() in _formula_lines() for line in text.split("\n"))
    return mathml(text) if is_formula else block[0]


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each loss, the tutorial as a notebook, and the notebook on gradients as a page."""
    for cls, entries in by_class().items():
        files.append(File.generated(config, path_of(cls), content=page_of_loss(entries)))
    tutorial = files.get_file_from_path("from-one-gpu-to-many.md")
    notebook = nbformat.writes(as_notebook(tutorial.content_string))
    files.append(File.generated(config, "from-one-gpu-to-many.ipynb", content=notebook))
    files.append(
        File.generated(config, "gradient-table.md", content=as_page(ROOT / "examples" / "gradient_table.ipynb"))
    )
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """List the losses of a family in its page; a search shows the page of a loss below those that explain."""
    if page.file.src_uri.startswith("reference/losses/"):
        page.meta.setdefault("search", {"boost": 0.3})
    _markdown[page.file.src_uri] = with_docstrings(with_snippets(with_losses(markdown)))
    return with_losses(markdown)


def on_post_build(config: Any) -> None:
    """Write each page as Markdown beside it, and ``llms.txt``, which lists them for assistants."""
    text = f"# {config.site_name}\n\n> {config.site_description}\n\n## Pages\n\n"
    for path, markdown in sorted(_markdown.items()):
        Path(config.site_dir, path).write_text(markdown, encoding="utf-8")
        title = re.search(r"^# (.+?)(?: \{.*\})?$", markdown, re.MULTILINE)
        text += f"- [{title[1] if title else path}]({path}): {first_sentence(markdown)}\n"
    Path(config.site_dir, "llms.txt").write_text(text, encoding="utf-8")


def on_page_content(html: str, **_: Any) -> str:
    """Render formulas, and show the name alone where docstrings say :func:`name` to readers of help()."""
    html = re.sub(r":(?:attr|class|data|func|meth|mod):<code>(?:contrastive_zoo\.(?:\w+\.)*)?", "<code>", html)
    return _BLOCK.sub(_with_formula, html)
