"""The catalogue of losses: one entry per loss, by family. Each is a row of ``catalogue.md``."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import contrastive_zoo
from contrastive_zoo.loss_base.loss import Loss

_ARGUMENTS = {"views": {"view1": "rows", "view2": "rows"}, "labels": {"embeddings": "rows", "labels": "labels"}}


@dataclass(frozen=True)
class Entry:
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

    @property
    def kinds(self) -> dict[str, str]:
        return self.arguments or _ARGUMENTS[self.call]


def _read_table() -> Iterator[Entry]:
    lines = Path(__file__).with_suffix(".md").read_text(encoding="utf-8").splitlines()
    names, _, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in lines)
    for row in rows:
        cells: dict[str, Any] = dict(zip(names, row, strict=True))
        cells["settings"] = json.loads(cells["settings"] or "{}")
        cells["arguments"] = dict(x.split(": ") for x in cells["arguments"].split(", ") if x)
        yield Entry(**cells)


CATALOGUE = {entry.name: entry for entry in _read_table()}  # all losses by name


def find_entry(name: str) -> Entry | None:
    """Return the entry of a loss by its name, or by that of its class; None if there is none."""
    return next((entry for entry in CATALOGUE.values() if name in (entry.name, entry.cls)), None)
