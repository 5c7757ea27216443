"""The table of projects: where the loss stands, what the trainer calls, and how we call it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contrastive_zoo.testing.measurement import Call


@dataclass(frozen=True)
class Entry:
    """A loss of a public trainer."""

    project: str  # owner/name
    commit: str  # that was read
    about: str
    file: str
    line: str  # text of the line, whose number changes between commits
    source: str = ""  # folder in which the project's packages begin
    call: Call = "views"
    adapter: str = ""  # function of tools.wild.adapters; empty where the loss cannot run here
    settings: dict[str, Any] = field(default_factory=dict)  # of the adapter
    normalize: bool = False  # whether the trainer normalises embeddings before the loss
    learnable: Sequence[str] = ()  # what the trainer's model learns for the loss: "scale", "bias"
    why_not: str = ""  # it cannot run here

    @property
    def name(self) -> str:
        return f"{self.project}: {self.about}"

    @property
    def module(self) -> str:
        """The dotted name of the file."""
        return Path(self.file).relative_to(self.source).with_suffix("").as_posix().replace("/", ".")

    def clone(self, folder: Path) -> Path:
        """Return the project's folder among clones, which are named owner+name."""
        return folder / self.project.replace("/", "+")

    def line_number(self, folder: Path) -> int:
        """Return the number of the line, 0 if the file has none with this text."""
        path = self.clone(folder) / self.file
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        return next((number for number, line in enumerate(lines, 1) if self.line in line), 0)


def entries() -> list[Entry]:
    """Return the losses of ``projects.json``, by kind of trainer: texts, images and texts, images."""
    projects = json.loads(Path(__file__).with_name("projects.json").read_text(encoding="utf-8"))
    return [Entry(name, x["commit"], **loss) for name, x in projects.items() for loss in x["losses"]]
