"""What mkdocs does not know by itself."""

import html as html_module
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent))  # for tools, which is not installed

from contrastive_zoo.testing.catalogue import CATALOGUE
from tools.formulas import mathml
from tools.zoo_page import with_losses

_BLOCK = re.compile(
    r'<div class="(?:language-text )?highlight"><pre><span></span><code>(.*?)</code></pre></div>', re.DOTALL
)


@cache
def _formula_lines() -> frozenset[str]:
    return frozenset(line.strip() for entry in CATALOGUE.values() for line in entry.formula.split("\n"))


def _with_formula(block: re.Match[str]) -> str:
    text = html_module.unescape(re.sub(r"<[^>]+>", "", block[1])).strip("\n")
    is_formula = all(line.strip() in _formula_lines() for line in text.split("\n"))
    return mathml(text) if is_formula else block[0]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """List the losses of a family in its page of the reference."""
    return with_losses(markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Render formulas, and show the name alone where docstrings say :func:`name` to readers of help()."""
    html = re.sub(r":(?:attr|class|data|func|meth|mod):<code>(?:contrastive_zoo\.(?:\w+\.)*)?", "<code>", html)
    return _BLOCK.sub(_with_formula, html)
