"""The standard terms are used: no private vocabulary in the package, the pages and the README."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent

PRIVATE = {
    r"luggage": "payload",
    r"bags?": "payload",
    r"travel(?:s|led|ling|ed)?": "send, gather",
    r"strangers?": "padding, unrelated samples",
    r"mend(?:s|ed|ing)?": "fix",
    r"everybody(?:'?s)?": "all ranks, gathered",
    r"dealt|deals": "split over ranks",
    r"species": "entry",
    r"pace": "stride",
    r"laws?": "invariant",
    r"foreign loss(?:es)?": "third-party loss",
    r"needs?\s+to\s+need": "needs",
    r"not to be noticed": "transparent",
    r"drift apart": "diverge",
    r"lie over": "split over ranks",
}
"""Words that only this project's authors understand, as regular expressions, and the standard term."""

COVERED = ("README.md", "CONTRIBUTING.md", "docs", "contrastive_zoo", "tests", "tools", "benchmarks", "examples")
"""Files and folders that use standard terms: all but the changelog, which lists old names, and this file."""

ALLOWED = {
    "everybody-elses-losses.md": "the address of a page, which links from elsewhere use",
}
"""Text that may contain such a word, and why."""

_WORD = re.compile(rf"\b(?:{'|'.join(PRIVATE)})\b", re.IGNORECASE)


def files() -> list[Path]:
    """Return the covered Python and Markdown files."""
    found = []
    for name in COVERED:
        path = ROOT / name
        inside = [*path.rglob("*.py"), *path.rglob("*.md")] if path.is_dir() else [path]
        found += [x for x in inside if x.exists() and x != Path(__file__)]
    return sorted(found)


def private_words(text: str) -> list[str]:
    """Return the private words of a text, except in allowed phrases."""
    for allowed in ALLOWED:
        text = text.replace(allowed, "")
    return _WORD.findall(text)


_SWITCHED_OFF = re.compile(r"#\s*(?:type:\s*ignore|noqa)\S*(?:\s+[A-Z]\d+,?)*\s*(.*)")
"""A check of a linter or type checker that is switched off in a line, and what follows it."""


def unexplained(text: str) -> list[str]:
    """Return the lines in which a check is switched off without a reason."""
    found = ((line, match) for line in text.splitlines() if (match := _SWITCHED_OFF.search(line)))
    return [line.strip() for line, match in found if not match[1].lstrip("# -")]


def test_a_check_that_is_switched_off_says_why() -> None:
    python = [path for path in files() if path.suffix == ".py"]
    found = {str(path.relative_to(ROOT)): unexplained(path.read_text(encoding="utf-8")) for path in python}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_a_missing_reason_is_found() -> None:
    """The sign is put together here, so that this file has none."""
    off = [f"{sign} {what}" for sign in "#" for what in ("type: ignore[misc]", "noqa: F401, I001", "noqa")]
    assert unexplained("\n".join([*off, *(f"{x}  # a reason" for x in off), *(f"{x} - why" for x in off)])) == off


def test_the_files_are_found() -> None:
    assert {"README.md", "check.py", "cli.py", "zoo.md"} <= {path.name for path in files()}


def test_standard_terms_are_used() -> None:
    found = {str(path.relative_to(ROOT)): private_words(path.read_text(encoding="utf-8")) for path in files()}
    assert {path: words for path, words in found.items() if words} == {}


def test_a_private_word_is_found() -> None:
    assert private_words("The mend travels in everybody's luggage.") == ["mend", "travels", "everybody's", "luggage"]
    assert private_words("[losses](everybody-elses-losses.md), a recommended flaw") == []
