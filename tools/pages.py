"""Tables in Markdown, and the parts of pages that programs write; a part stands between two comments with its name."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "pages"


def table(head: Sequence[str], lines: Iterable[Sequence[Any]], texts: int = 2) -> str:
    """Return a Markdown table; all columns but so many first ones are numbers.

    Examples:
        >>> print(table(["loss", "ms"], [["NTXent", 1.5], ["a | b", "2.0"]], texts=1))
        | loss | ms |
        | --- | ---: |
        | NTXent | 1.5 |
        | a \\| b | 2.0 |
    """
    rule = [*["---"] * texts, *["---:"] * (len(head) - texts)]
    rows = ([str(cell).replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule[: len(head)], *rows))


def filled(page: str, part: str, text: str) -> str:
    """Return the page with another text of the part; unchanged if it has no such part.

    Examples:
        >>> filled("<!-- times: begin --> old <!-- times: end -->", "times", "new")
        '<!-- times: begin -->\\nnew\\n<!-- times: end -->'
    """
    begin, end = f"<!-- {part}: begin -->", f"<!-- {part}: end -->"
    return re.sub(f"(?s){begin}.*?{end}", lambda _: f"{begin}\n{text}\n{end}", page)


def fill(path: Path, parts: Mapping[str, str]) -> None:
    page = path.read_text(encoding="utf-8")
    for part, text in parts.items():
        page = filled(page, part, text)
    path.write_text(page, encoding="utf-8")
