"""The standard terms are used: no private vocabulary in the package, the pages and the README."""

import ast
import functools
import re
from collections.abc import Callable, Collection
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
    paths: list[Path] = []
    for name in COVERED:
        path = ROOT / name
        paths += [*path.rglob("*.py"), *path.rglob("*.md")] if path.is_dir() else [path]
    covered = sorted(path for path in paths if path.exists() and path != Path(__file__))
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in covered}


def violations(rule: Callable[[str], Collection[str]], suffix: str, under: str = "") -> dict[str, Collection[str]]:
    refused = {path: rule(text) for path, text in files().items() if path.endswith(suffix) and path.startswith(under)}
    return {path: words for path, words in refused.items() if words}


def private_words(text: str) -> list[str]:
    return _WORD.findall(text)


def test_the_files_are_read() -> None:
    assert {"README.md", "check.py", "cli.py", "zoo.md"} <= {Path(path).name for path in files()}


def test_standard_terms_are_used() -> None:
    assert violations(private_words, "") == {}


def test_names_are_standard_terms() -> None:
    assert violations(private_names, ".py") == {}


def test_names_of_the_package_are_nouns() -> None:
    assert violations(not_nouns, ".py", "contrastive_zoo/") == {}


def test_violations_are_noticed() -> None:
    assert private_words("The mend travels in everybody's luggage.") == ["mend", "travels", "everybody's", "luggage"]
    assert private_words("a recommended flaw") == []
    code = "def meet(guilty, embedding_bag): foreignLoss = 'pull'; impulley, DrawsLaws, Law = 1, 2, 3"
    assert private_names(code) == {"meet", "guilty", "foreignLoss", "Law"}
    code = "from hypothesis import given\ndef f(own, found_there): x.wrong = found = own"
    assert not_nouns(code) == {"own", "wrong", "found"}
