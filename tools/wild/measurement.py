"""Run the doctor on the entries, and describe in a line what each computes."""

import math
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.check import examine
from contrastive_zoo.testing.measurement import Case
from contrastive_zoo.testing.worlds import Worlds
from tools.gallery.recipe import Recipe
from tools.gallery_measurement import Row as Described
from tools.gallery_measurement import measure
from tools.loading import InFloat64OnCPU, load
from tools.wild import adapters
from tools.wild.projects import Entry

EVEN = (GlobalBatch((6, 6), d=4), GlobalBatch((6, 6, 6), d=4))
UNEVEN = GlobalBatch((3, 9), d=4)
LEARNABLE = {"scale": math.log(3.0), "bias": -2.0}
"""First values; a scale is the exponential of what is learnt."""


class Called(nn.Module):
    """A project's loss, with what its trainer does before; it sees no GPU, and float64 in place of float32."""

    def __init__(self, loss: Any, entry: Entry) -> None:
        super().__init__()
        self.loss, self.entry = loss, entry
        self.learnt = nn.ParameterDict({name: torch.tensor(LEARNABLE[name]) for name in entry.learnable})

    def forward(self, first: Tensor, second: Tensor) -> Any:
        rows = [first, second]
        if self.entry.normalize:
            rows = [adapters.unit(x) if x.is_floating_point() else x for x in rows]
        with InFloat64OnCPU():
            return self.loss(*rows, *(x.exp() if name == "scale" else x for name, x in self.learnt.items()))


def make_loss(folder: Path, entry: Entry) -> nn.Module:
    """Return a project's loss; runs on every rank."""
    with InFloat64OnCPU():
        module = load(entry.clone(folder) / entry.source, entry.module)
        return Called(getattr(adapters, entry.adapter)(module, **entry.settings), entry)


@dataclass(frozen=True)
class Row:
    """What an entry computes, or why it did not run."""

    entry: Entry
    commit: str  # of the clone; that of the entry if there is no clone
    line_number: int
    why_not: str = ""
    columns: tuple[str, ...] = ()  # value, gradients of encoder and parameters, what uneven shards change
    verdict: str = ""  # the doctor's name for the mistake, or RIGHT
    fix: str = ""


RIGHT = "the same on any number of processes"
"""Verdict on a loss that satisfies every invariant."""


def measured(
    entry: Entry, folder: Path, worlds: Worlds, max_examples: int = 12, world_sizes: Sequence[int] = (1, 2, 3)
) -> Row:
    """Run the doctor on one entry."""
    clone = entry.clone(folder)
    row = partial(Row, entry, _commit(clone) or entry.commit, entry.line_number(folder))
    if not entry.adapter:
        return row(why_not=entry.why_not)
    if not (clone / entry.file).is_file():
        return row(why_not=f"no such file in the folder: {clone.name}/{entry.file}")
    make = partial(make_loss, folder, entry)
    options = {"world_sizes": world_sizes, "call": entry.call, "max_examples": max_examples, "name": entry.name}
    try:
        report = examine(make, worlds=worlds, **options)
    except ValueError as error:  # it cannot be constructed, or raises on one process
        return row(why_not=" ".join(str(error).split())[-300:])
    case = Case(make, entry.call, "mean", name=entry.name)
    even = tuple(measure(case, x, worlds) for x in EVEN if len(x.shards) in world_sizes)
    recipe = Recipe(entry.name, make, None, entry.call, "mean", entry.about)
    described = Described(recipe, even, measure(case, UNEVEN, worlds), report)
    diagnosis = report.diagnosis
    verdict = (diagnosis.mistake, diagnosis.fix) if diagnosis else (RIGHT, "")
    return row("", (*described.on_even, described.on_uneven), *verdict)


def _commit(clone: Path) -> str:
    command = ["git", "-C", str(clone), "rev-parse", "--short=7", "HEAD"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False) if (clone / ".git").exists() else None
    return answer.stdout.strip() if answer and answer.returncode == 0 else ""
