"""The standard terms are used: no private vocabulary in the package, the pages and the README."""

import ast
import functools
import re
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

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

_WORD = re.compile(rf"\b(?:{'|'.join(PRIVATE)})\b", re.IGNORECASE)


PRIVATE_PARTS = {
    "guilty": "failing_rank, is_bad",
    "foreign": "third_party",
    "meet": "shake_hands, agree_on",
    "meets": "shake_hands, agree_on",
    "meeting": "handshake",
    "pull": "gradient with respect to the candidates, attraction",
    "law": "invariant",
}
"""Parts of identifiers, between underscores or capitals, that say nothing to who reads them first; and what does."""

NOT_NOUNS = {"own": "local", "wrong": "mistake", "found": "result", "given": "settings"}
"""Names of variables, arguments and functions of the package that say nothing alone; and what may stand for them."""

_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_OF_NAMES = {ast.Name: "id", ast.arg: "arg", ast.Attribute: "attr", ast.FunctionDef: "name", ast.ClassDef: "name"}


def names(source: str, *, read: bool) -> set[str]:
    """Return the names of some code, also those that it only reads, or what it defines and sets."""
    nodes = (x for x in ast.walk(ast.parse(source)) if read or not isinstance(getattr(x, "ctx", None), ast.Load))
    return {getattr(x, _OF_NAMES[type(x)]) for x in nodes if type(x) in _OF_NAMES}


def private_names(source: str) -> set[str]:
    found = names(source, read=True)
    return {name for name in found if {x.lower() for x in _PART.findall(name)} & PRIVATE_PARTS.keys()}


def not_nouns(source: str) -> set[str]:
    return names(source, read=False) & NOT_NOUNS.keys()


@functools.cache
def files() -> dict[str, str]:
    folders = [ROOT / name for name in COVERED if (ROOT / name).is_dir()]
    paths = [x for folder in folders for suffix in ("py", "md") for x in folder.rglob(f"*.{suffix}")]
    covered = {*paths, *(ROOT / name for name in COVERED)} - {*folders, Path(__file__)}
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted(covered)}


def private_words(text: str) -> list[str]:
    return _WORD.findall(text)


@pytest.mark.parametrize(
    ("rule", "suffix", "under"),
    [(private_words, "", ""), (private_names, ".py", ""), (not_nouns, ".py", "contrastive_zoo/")],
)
def test_standard_terms_are_used(rule: Callable[[str], Collection[str]], suffix: str, under: str) -> None:
    read = {path: text for path, text in files().items() if path.endswith(suffix) and path.startswith(under)}
    assert "contrastive_zoo/testing/check.py" in read
    assert {path: words for path, text in read.items() if (words := rule(text))} == {}


def test_violations_are_noticed() -> None:
    assert {"README.md", "docs/pages/zoo.md"} <= files().keys()
    assert private_words("The mend travels in everybody's luggage.") == ["mend", "travels", "everybody's", "luggage"]
    assert private_words("a recommended flaw") == []
    code = "def meet(guilty, embedding_bag): foreignLoss = 'pull'; impulley, DrawsLaws, Law = 1, 2, 3"
    assert private_names(code) == {"meet", "guilty", "foreignLoss", "Law"}
    code = "from hypothesis import given\ndef f(own, found_there): x.wrong = found = own"
    assert not_nouns(code) == {"own", "wrong", "found"}
