"""Docstrings of installed packages as queries and documents: the summary of a docstring is to find its other paragraphs."""

import ast
import re
import zlib
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

PACKAGES = (
    "numpy",
    "scipy",
    "sklearn",
    "torch",
    "asyncio",
    "concurrent",
    "email",
    "http",
    "json",
    "logging",
    "unittest",
)
LEFT_OUT = {"tests", "test", "testing", "externals", "_inductor"}  # folders
STEM = 5  # letters: a word also counts as its first five
TOKENS = 128  # of a text at most
BUCKETS = 2**14  # of hashed words and stems; 0 is padding
OF_TEST = 40  # of 256 documents


class Texts(NamedTuple):
    """Queries, distinct documents, and the document of each query."""

    queries: list[str]
    documents: list[str]
    document_of: Tensor

    def test(self) -> "Texts":
        """Return the part for the test, which is a function of the documents' words."""
        return self._part(is_test=True)

    def train(self) -> "Texts":
        return self._part(is_test=False)

    def _part(self, *, is_test: bool) -> "Texts":
        kept = [(zlib.crc32(x.encode()) % 256 < OF_TEST) == is_test for x in self.documents]
        pairs = [
            (q, self.documents[i]) for q, i in zip(self.queries, self.document_of.tolist(), strict=True) if kept[i]
        ]
        return paired(pairs)


def paired(pairs: Sequence[tuple[str, str]]) -> Texts:
    numbers: dict[str, int] = {}
    document_of = [numbers.setdefault(document, len(numbers)) for _, document in pairs]
    return Texts([query for query, _ in pairs], list(numbers), torch.tensor(document_of))


def texts(packages: Sequence[str] = PACKAGES) -> Texts:
    """Return the words of all docstrings that have a summary and 20 more words, without examples."""
    return paired([pair for package in packages for pair in _of_package(package)])


def _of_package(package: str) -> Iterator[tuple[str, str]]:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"docstrings are read from installed packages, got {package}")
    folder = spec.submodule_search_locations[0]
    for file in sorted(Path(folder).rglob("*.py")):
        if LEFT_OUT.isdisjoint(file.relative_to(folder).parts):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                    summary, *paragraphs = re.split(r"\n\s*\n", ast.get_docstring(node) or "")
                    query, document = words(summary), words(" ".join(x for x in paragraphs if ">>>" not in x))
                    if 4 <= len(query) <= 30 and len(document) >= 20:
                        yield " ".join(query), " ".join(document[:256])


def words(text: str) -> list[str]:
    return re.findall("[a-z]+", re.sub("(?<=[a-z])(?=[A-Z])", " ", text).lower())


def tokens(rows: Sequence[str]) -> Tensor:
    """Return the hashed words and stems of each text, each once, padded on the right: [n, TOKENS]."""
    result = [torch.tensor([*_buckets(row)][:TOKENS]) for row in rows]
    padded = nn.utils.rnn.pad_sequence([*result, torch.zeros(TOKENS, dtype=torch.long)], batch_first=True)
    return padded[:-1]


def _buckets(text: str) -> Iterator[int]:
    for word in dict.fromkeys(text.split()):
        for feature in (word, f"{word[:STEM]}-") if len(word) > STEM else (word,):
            yield 1 + zlib.crc32(feature.encode()) % (BUCKETS - 1)
