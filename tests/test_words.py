"""The standard terms are used: no private vocabulary in the package, the pages and the README."""

import io
import re
import tokenize
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


PRIVATE_PARTS = {
    "guilty": "failing_rank, is_bad",
    "foreign": "third_party",
    "meet": "shake_hands, agree_on",
    "meets": "shake_hands, agree_on",
    "meeting": "handshake",
    "pull": "gradient with respect to the candidates, attraction",
    "luggage": "payload",
    "mend": "fix",
    "travel": "send, gather",
    "stranger": "padding",
    "law": "invariant",
    "species": "entry",
}
"""Parts of identifiers, between underscores or capitals, that say nothing to who reads them first; and what does."""

_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def private_names(source: str) -> set[str]:
    """Return the identifiers of Python code that have such a part."""
    words = {x.string for x in tokenize.generate_tokens(io.StringIO(source).readline) if x.type == tokenize.NAME}
    return {word for word in words if {x.lower() for x in _PART.findall(word)} & PRIVATE_PARTS.keys()}


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


def test_names_are_standard_terms() -> None:
    python = [path for path in files() if path.suffix == ".py"]
    found = {str(path.relative_to(ROOT)): private_names(path.read_text(encoding="utf-8")) for path in python}
    assert {path: names for path, names in found.items() if names} == {}


def test_a_private_name_is_found() -> None:
    code = "def meet(guilty, embedding_bag): foreignLoss = 'pull'; impulley, DrawsLaws, Law = 1, 2, 3"
    assert private_names(code) == {"meet", "guilty", "foreignLoss", "Law"}


def test_a_private_word_is_found() -> None:
    assert private_words("The mend travels in everybody's luggage.") == ["mend", "travels", "everybody's", "luggage"]
    assert private_words("[losses](everybody-elses-losses.md), a recommended flaw") == []
