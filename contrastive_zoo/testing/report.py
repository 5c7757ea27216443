"""The reports of a check and of an audit: what was compared, the mistakes, and what was not compared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from contrastive_zoo.testing.evidence import Ratio
from contrastive_zoo.testing.mistakes import Diagnosis

if TYPE_CHECKING:  # they need cloudpickle, which an audit does not
    from contrastive_zoo.testing.batch import GlobalBatch
    from contrastive_zoo.testing.invariants import Invariant
    from contrastive_zoo.testing.measurement import GradReduction


def require_world_sizes(world_sizes: Sequence[int]) -> None:
    if not world_sizes or min(world_sizes) < 1:
        raise ValueError(f"world_sizes are numbers of processes, at least 1 each, got {list(world_sizes)}.")


class _Result:
    """A report: ``str`` is what is printed, ``as_dict`` is the report in plain types, for JSON."""

    ok: Any

    @property
    def status(self) -> int:
        """The exit status of the command: 0 the same, 1 not the same, 2 not known."""
        return {True: 0, False: 1, None: 2}[self.ok]


def _indented(lines: Iterable[object]) -> str:
    return "".join("\n  " + str(line).replace("\n", "\n      ") for line in lines)


@dataclass
class Finding:
    """An invariant that is broken, with the smallest global batch found that shows it."""

    invariant: Invariant
    message: str  # the value found and the value expected
    batch: GlobalBatch


@dataclass
class Report(_Result):
    name: str  # of the loss
    world_sizes: tuple[int, ...]
    grad_reduction: GradReduction  # whether the trainer is assumed to average or sum gradients over ranks
    examples: int = 0  # number of global batches tested
    findings: list[Finding] = field(default_factory=list)  # one for each broken invariant, the most basic first
    diagnosis: Diagnosis | None = None  # None if no invariant is broken
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)  # how the loss computes, where it is not exact
    tried: set[str] = field(default_factory=set)  # names of the invariants that applied to at least one batch

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def verdict(self) -> str:
        trainer = f"a trainer that {'averages' if self.grad_reduction == 'mean' else 'sums'} gradients"
        *others, last = map(str, self.world_sizes)
        sizes = f"{', '.join(others)} and {last}" if others else last
        extent = f"{self.examples} global batches on {sizes} processes, {trainer}"
        return f"{self.name} is {'' if self.ok else 'not '}the same function on any number of processes ({extent})."

    def __str__(self) -> str:
        lines = [f"{x.invariant}: {x.batch}   # {x.batch!r}\n{x.message}" for x in self.findings]
        lines += [f"Diagnosis: {self.diagnosis}"] if self.diagnosis else []
        return self.verdict + _indented([*lines, *(f"Note: {self.name} {note}." for note in self.notes)])

    def as_dict(self) -> dict[str, Any]:
        from contrastive_zoo.testing.invariants import INVARIANTS

        plain = {name: getattr(self, name) for name in ("ok", "grad_reduction", "examples", "notes")}
        invariants: dict[str, Any] = {x.name: {"holds": True if x.name in self.tried else None} for x in INVARIANTS}
        for x in self.findings:
            invariants[x.invariant.name] = {"holds": False, "message": x.message, "batch": repr(x.batch)}
        plain |= {"loss": self.name, "world_sizes": list(self.world_sizes), "seconds": round(self.seconds, 2)}
        return plain | {"invariants": invariants, "diagnosis": self.diagnosis and self.diagnosis.as_dict()}


class NotInvariant(AssertionError):
    """A loss depends on the number of processes; ``report`` has the details."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


HEADINGS = ("compared with one process", "the same", "ratio", "cosine", "error", "tolerance")


@dataclass
class Quantity:
    """A quantity of a training that was compared with one process."""

    name: str
    ratio: Ratio | None = None  # of the rank with the largest error; None if it was not compared
    tolerance: float = 0.0  # largest relative error of a right training
    reason: str = ""  # why it was not compared
    step: int = 0  # of the largest error
    is_noted: bool = False  # whether a note explains a difference that is no mistake

    @property
    def ok(self) -> bool | None:
        return None if self.ratio is None else self.ratio.error <= self.tolerance

    @property
    def differs(self) -> bool:
        """Whether it is not that of one process, and no note explains it."""
        return self.ok is False and not self.is_noted

    def row(self) -> tuple[str, ...]:
        answer = "see note" if self.is_noted else {True: "yes", False: "no", None: "not compared"}[self.ok]
        if self.ratio is None:
            return self.name, answer
        error = self.ratio.error
        shown = f"{error:.1%}" if math.isfinite(error) and error >= 0.001 else f"{error:.0e}"
        return self.name, answer, f"{self.ratio.ratio:.4g}", f"{self.ratio.cosine:.4f}", shown, f"{self.tolerance:.0e}"

    def as_dict(self) -> dict[str, Any]:
        numbers = {} if self.ratio is None else self.ratio._asdict()
        finite = {key: value if math.isfinite(value) else None for key, value in numbers.items()}
        tail = {"tolerance": self.tolerance, "reason": self.reason, "step": self.step + 1}
        return {"name": self.name, "ok": self.ok, **finite, **tail}


@dataclass
class WorldReport:
    """The audit of a training on W processes."""

    world_size: int
    steps: int = 0  # number of steps that all ranks finished
    losses: list[str] = field(default_factory=list)  # their classes
    quantities: list[Quantity] = field(default_factory=list)  # each at the step of its largest error
    findings: list[Diagnosis] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what is not a mistake, and is good to know
    problem: str = ""  # why nothing could be compared
    seconds: float = 0.0

    @property
    def not_compared(self) -> list[str]:
        return list(dict.fromkeys(x.reason for x in self.quantities if x.ok is None))

    @property
    def ok(self) -> bool | None:
        """Whether the training is the same as on one process; None if something was not compared and no mistake found."""
        if self.findings or any(x.differs for x in self.quantities):
            return False
        return True if self.quantities and not self.not_compared and not self.problem else None

    def __str__(self) -> str:
        losses = f", {', '.join(dict.fromkeys(self.losses))}" if self.losses else ""
        rows = [HEADINGS, *(x.row() for x in self.quantities)] if self.quantities else []
        widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
        lines = [" ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        lines += [*(f"Not compared: {x}." for x in self.not_compared), *filter(None, [self.problem])]
        lines += [*(f"Diagnosis: {x}" for x in self.findings), *(f"Note: {x}." for x in self.notes)]
        return f"{self.world_size} processes, {self.steps} steps{losses} ({self.seconds:.1f} s){_indented(lines)}"

    def as_dict(self) -> dict[str, Any]:
        lists = {name: [x.as_dict() for x in getattr(self, name)] for name in ("quantities", "findings")}
        return vars(self) | lists | {"ok": self.ok, "seconds": round(self.seconds, 2)}


@dataclass
class AuditReport(_Result):
    """The audit of a script on several numbers of processes, a report for each."""

    name: str  # of the script
    worlds: list[WorldReport] = field(default_factory=list)

    @property
    def ok(self) -> bool | None:
        result = [x.ok for x in self.worlds]
        return False if False in result else None if None in result or not result else True

    @property
    def findings(self) -> list[Diagnosis]:
        return list({x.mistake: x for world in self.worlds for x in world.findings}.values())

    @property
    def verdict(self) -> str:
        if self.ok is not None:
            return f"{self.name}: the training is {'' if self.ok else 'not '}the same as on one process."
        is_compared = any(y.ok is not None for x in self.worlds for y in x.quantities)
        words = "no mistake was found, but not everything" if is_compared else "nothing"
        why = next((f": {y.splitlines()[0]}" for x in self.worlds for y in [x.problem, *x.not_compared] if y), "")
        return f"{self.name}: {words} was compared{why.rstrip('.:')}."

    def __str__(self) -> str:
        return "\n".join(map(str, [*self.worlds, self.verdict]))

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "ok": self.ok, "worlds": [x.as_dict() for x in self.worlds]}
