"""The report of a check: the broken invariants, the smallest batches that show them, and the diagnosis."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.invariants import INVARIANTS, Invariant
from contrastive_zoo.testing.measurement import GradReduction
from contrastive_zoo.testing.mistakes import Diagnosis


@dataclass
class Finding:
    """An invariant that is broken, with the smallest batch found that shows it.

    Args:
        invariant: the broken invariant.
        message: the value found and the value expected.
        batch: the global batch.
    """

    invariant: Invariant
    message: str
    batch: GlobalBatch


@dataclass
class Report:
    """The result of a check.

    Args:
        name: name of the loss.
        world_sizes: the world sizes W tested.
        grad_reduction: whether the trainer is assumed to average or sum gradients over ranks.
        examples: number of global batches tested.
        findings: one for each broken invariant, the most basic first.
        diagnosis: the mistake and its fix; None if no invariant is broken.
        seconds: duration of the check.
    """

    name: str
    world_sizes: tuple[int, ...]
    grad_reduction: GradReduction
    examples: int = 0
    findings: list[Finding] = field(default_factory=list)
    diagnosis: Diagnosis | None = None
    seconds: float = 0.0
    tried: frozenset[str] = frozenset()
    """Names of the invariants that applied to at least one batch."""

    def holds(self, invariant: Invariant) -> bool | None:
        """Return whether an invariant held on every batch; None if it was not tried."""
        if any(finding.invariant is invariant for finding in self.findings):
            return False
        return True if invariant.name in self.tried else None

    @property
    def ok(self) -> bool:
        """Whether every invariant that was tried held on every batch."""
        return not self.findings

    def __str__(self) -> str:
        trainer = f"a trainer that {'averages' if self.grad_reduction == 'mean' else 'sums'} gradients"
        extent = f"{self.examples} global batches on {processes(self.world_sizes)}, {trainer}"
        if self.ok:
            return f"{self.name} is the same function on any number of processes ({extent})."
        lines = [f"{self.name} is not the same function on any number of processes ({extent}).", *self._diagnosis()]
        lines += [
            f"  {finding.invariant}: {finding.message}\n      at {finding.batch}   # {finding.batch!r}"
            for finding in self.findings
        ]
        return "\n".join(lines)

    def _diagnosis(self) -> list[str]:
        return [] if self.diagnosis is None else [f"Diagnosis: {self.diagnosis}"]

    def as_dict(self) -> dict[str, Any]:
        """Return the report in plain types, for JSON."""
        return {
            "loss": self.name,
            "ok": self.ok,
            "world_sizes": list(self.world_sizes),
            "grad_reduction": self.grad_reduction,
            "examples": self.examples,
            "seconds": round(self.seconds, 2),
            "invariants": {invariant.name: self._invariant_as_dict(invariant) for invariant in INVARIANTS},
            "diagnosis": None
            if self.diagnosis is None
            else {"mistake": self.diagnosis.mistake, "why": self.diagnosis.why, "fix": self.diagnosis.fix},
        }

    def _invariant_as_dict(self, invariant: Invariant) -> dict[str, Any]:
        for finding in self.findings:
            if finding.invariant is invariant:
                return {"holds": False, "message": finding.message, "batch": repr(finding.batch)}
        return {"holds": self.holds(invariant)}


def processes(world_sizes: Sequence[int]) -> str:
    """Return world sizes in words.

    Examples:
        >>> processes((2,)), processes((1, 2, 4))
        ('2 processes', '1, 2 and 4 processes')
    """
    *others, last = map(str, world_sizes)
    return f"{' and '.join([', '.join(others), last] if others else [last])} processes"


class NotInvariant(AssertionError):
    """A loss depends on the number of processes; ``report`` has the details."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report
