"""Run the doctor on the entries, and describe in a line what each computes."""

import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.check import examine
from contrastive_zoo.testing.gallery.recipe import Recipe
from contrastive_zoo.testing.measurement import Case
from contrastive_zoo.testing.worlds import Worlds
from tools.gallery_measurement import Row as Described
from tools.gallery_measurement import measure
from tools.wild.adapters import Adapter
from tools.wild.loading import InFloat64OnCPU, load
from tools.wild.projects import Entry

EVEN = (GlobalBatch((6, 6), d=4), GlobalBatch((6, 6, 6), d=4))
UNEVEN = GlobalBatch((3, 9), d=4)


class _OnCPU(nn.Module):
    """A project's loss, which sees no GPU and float64 where it would compute in float32."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, first: Tensor, second: Tensor) -> Any:
        with InFloat64OnCPU():
            return self.loss(first, second)


def make_loss(source: Path, module: str, adapter: Adapter) -> nn.Module:
    """Return a project's loss; runs on every rank."""
    with InFloat64OnCPU():
        return _OnCPU(adapter(load(source, module)))


@dataclass(frozen=True)
class Row:
    """What an entry computes, or why it did not run."""

    project: str
    commit: str  # of the clone; that of the entry if there is no clone
    file: str
    line: int
    about: str
    value: str = ""
    encoder: str = ""
    parameters: str = ""
    uneven: str = ""
    verdict: str = ""  # the doctor's name for the mistake, or "none needed"
    fix: str = ""
    why_not: str = ""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the row in plain types, for JSON."""
        return asdict(self)


RIGHT = "the same on any number of processes"
"""Verdict on a loss that satisfies every invariant."""


def measured(
    entry: Entry,
    folder: Path,
    worlds: Worlds,
    max_examples: int = 12,
    world_sizes: Sequence[int] = (1, 2, 3),
) -> Row:
    """Run the doctor on one entry."""
    clone = entry.clone(folder)
    at = (entry.project, _commit(clone) or entry.commit, entry.file, entry.line(folder), entry.about)
    if entry.adapter is None:
        return Row(*at, why_not=entry.why_not)
    if not (clone / entry.file).is_file():
        return Row(*at, why_not=f"no such file in the folder: {clone.name}/{entry.file}")
    make = partial(make_loss, clone / entry.source, entry.module, entry.adapter)
    try:
        report = examine(
            make, world_sizes=world_sizes, call=entry.call, max_examples=max_examples, worlds=worlds, name=entry.name
        )
    except ValueError as error:  # it cannot be constructed, or raises on one process
        return Row(*at, why_not=" ".join(str(error).split())[-300:])
    recipe = Recipe(entry.name, make, None, entry.call, "mean", entry.about)
    case = Case(make, entry.call, "mean", name=entry.name)
    even, uneven = _described(recipe, case, worlds, report, [x for x in EVEN if len(x.shards) in world_sizes])
    diagnosis = report.diagnosis
    names = (diagnosis.mistake, diagnosis.fix) if diagnosis else (RIGHT, "")
    value, encoder, parameters = even
    return Row(*at, value, encoder, parameters, uneven, *names, seconds=round(report.seconds, 1))


def _described(
    recipe: Recipe, case: Case, worlds: Worlds, report: Any, even: Sequence[GlobalBatch]
) -> tuple[Sequence[str], str]:
    described = Described(recipe, tuple(measure(case, x, worlds) for x in even), measure(case, UNEVEN, worlds), report)
    return described.on_even, described.on_uneven


def _commit(clone: Path) -> str:
    command = ["git", "-C", str(clone), "rev-parse", "--short=7", "HEAD"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False) if (clone / ".git").exists() else None
    return answer.stdout.strip() if answer and answer.returncode == 0 else ""
