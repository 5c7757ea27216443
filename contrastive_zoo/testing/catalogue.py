"""The catalogue of losses: one entry per loss, by family. Each is a row of ``catalogue.md``."""

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import nn

import contrastive_zoo
from contrastive_zoo.loss_base.loss import Loss

_ARGUMENTS = {"views": {"view1": "rows", "view2": "rows"}, "labels": {"embeddings": "rows", "labels": "labels"}}
_SECTION = re.compile(r"^(?:Args|Raises|Examples|Source):", re.MULTILINE)


@dataclass(frozen=True)
class Entry:
    """A loss of the catalogue."""

    name: str  # on the command line
    cls: str  # name of its class in contrastive_zoo
    call: Literal["views", "labels", "other"]  # loss(view1, view2), loss(embeddings, labels), or another form
    family: str  # the heading under which the page lists it
    engine: str  # that computes it; GEMM counts are forward + backward, in units of one N × d × N matmul
    settings: dict[str, Any]  # constructor arguments for a check
    arguments: dict[str, str]  # their kinds, keys of tools.vectors.cases.KINDS; empty for those that call implies
    inputs: str  # the arguments in words, where their names do not say enough
    draws: str  # what the loss draws, if it does: there are no conformance vectors of it
    peers: str  # names of the same formula in other libraries

    @property
    def loss(self) -> type[Loss]:
        return getattr(contrastive_zoo, self.cls)

    def make(self) -> Any:
        return self.loss(**self.settings)

    @cached_property
    def _docs(self) -> list[str]:
        """The docstrings of the class and its bases, where it leaves to them what it does not say."""
        return [inspect.cleandoc(vars(cls).get("__doc__") or "") for cls in self.loss.__mro__]

    @property
    def text(self) -> str:
        return " ".join([self.name, self.cls, self.family, self.called_with, self.summary, self.peers])

    def as_dict(self) -> dict[str, Any]:
        names = ["name", "call", "family", "engine", "settings", "summary", "parameters", "source", "peers"]
        return {"class": self.cls, "arguments": self.kinds} | {x: getattr(self, x) for x in names}

    @property
    def called_with(self) -> str:
        return self.inputs or ", ".join(self.kinds)

    @property
    def kinds(self) -> dict[str, str]:
        return self.arguments or _ARGUMENTS[self.call]

    @property
    def summary(self) -> str:
        return re.sub(r":\w+:`(\w+)`", r"\1", self._docs[0].partition("\n")[0])

    @property
    def parameters(self) -> str:
        taken = [x for x in inspect.signature(self.loss).parameters.values() if x.name != "check_finite"]
        return ", ".join(x.name if x.default is x.empty else f"{x.name}={default_text(x.default)}" for x in taken)

    @property
    def formula(self) -> str:
        result = (_SECTION.split(doc)[0].split("\n") for doc in self._docs)
        formulas = ("\n".join(line[4:] for line in lines if line.startswith("    ")).strip("\n") for lines in result)
        return next(filter(None, formulas), "")

    @property
    def source(self) -> str:
        return next(filter(None, (" ".join(doc.partition("Source:")[2].split()) for doc in self._docs)), "")


def default_text(default: object) -> str:
    """Return a default value as a signature shows it."""
    return f"Parameter({default.tolist()})" if isinstance(default, nn.Parameter) else repr(default)


def _read_table() -> Iterator[Entry]:
    lines = Path(__file__).with_suffix(".md").read_text(encoding="utf-8").splitlines()
    names, _, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in lines)
    for row in rows:
        cells: dict[str, Any] = dict(zip(names, row, strict=True))
        cells["settings"] = json.loads(cells["settings"] or "{}")
        cells["arguments"] = dict(x.split(": ") for x in cells["arguments"].split(", ") if x)
        yield Entry(**cells)


CATALOGUE = {entry.name: entry for entry in _read_table()}  # all losses by name
