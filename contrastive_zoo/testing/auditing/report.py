"""The report of an audit: what was compared, the mistakes that were found, and what was not compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from contrastive_zoo.testing.auditing.comparison import Quantity
from contrastive_zoo.testing.auditing.diagnosis import Finding
from contrastive_zoo.testing.auditing.mistakes import MISTAKES


@dataclass
class WorldReport:
    """The audit of a training on W processes.

    Attributes:
        world_size: number of processes W.
        steps: number of steps that all ranks finished.
        losses: the classes of the losses.
        quantities: what was compared, each at the step of its largest error.
        findings: the mistakes.
        notes: what is not a mistake, and is good to know.
        problem: why nothing could be compared; empty if something was.
        peak_bytes: largest resident memory of a process before the steps were repeated, and of the one that repeats them.
        seconds: duration.
        factors: the factor of each loss before its backward pass.
    """

    world_size: int
    steps: int = 0
    losses: list[str] = field(default_factory=list)
    quantities: list[Quantity] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problem: str = ""
    peak_bytes: tuple[int, int] = (0, 0)
    seconds: float = 0.0
    factors: list[float] = field(default_factory=list)

    @property
    def ok(self) -> bool | None:
        """Whether the training is the same as on one process; None if something was not compared and no mistake found."""
        if self.findings or any(x.ok is False and not x.is_noted for x in self.quantities):
            return False
        complete = self.quantities and all(x.ok is not None for x in self.quantities)
        return True if complete and not self.problem else None

    def as_dict(self) -> dict[str, Any]:
        """Return the report in plain types, for JSON."""
        return {
            "world_size": self.world_size,
            "ok": self.ok,
            "steps": self.steps,
            "losses": self.losses,
            "quantities": [_quantity_as_dict(x) for x in self.quantities],
            "findings": [
                {
                    "mistake": x.mistake,
                    "why": MISTAKES[x.mistake].why,
                    "measured": x.measured,
                    "fix": MISTAKES[x.mistake].fix,
                }
                for x in self.findings
            ],
            "notes": self.notes,
            "problem": self.problem,
            "peak_bytes": list(self.peak_bytes),
            "seconds": round(self.seconds, 2),
        }


@dataclass
class AuditReport:
    """The audit of a script on several numbers of processes.

    Attributes:
        name: of the script.
        worlds: the report of each number of processes.
    """

    name: str
    worlds: list[WorldReport] = field(default_factory=list)

    @property
    def ok(self) -> bool | None:
        """Whether the training is the same on every number of processes; None if that is not known."""
        result = [x.ok for x in self.worlds]
        return False if False in result else None if None in result or not result else True

    @property
    def findings(self) -> list[Finding]:
        """The mistakes, each once."""
        return list({x.mistake: x for world in self.worlds for x in world.findings}.values())

    @property
    def status(self) -> int:
        """The exit status of the command: 0 the same, 1 not the same, 2 not known."""
        return {True: 0, False: 1, None: 2}[self.ok]

    def as_dict(self) -> dict[str, Any]:
        """Return the report in plain types, for JSON."""
        return {"name": self.name, "ok": self.ok, "worlds": [x.as_dict() for x in self.worlds]}

    def __str__(self) -> str:
        lines = [f"{self.name}: {VERDICTS[self.ok]}."]
        for world in self.worlds:
            lines.append(f"{world.world_size} processes, {world.steps} steps. {world.problem}".rstrip())
            lines += [f"  {x.name}: {described(x)}" for x in world.quantities]
            lines += [f"  {x}" for x in world.findings]
            lines += [f"  Note: {x}" for x in world.notes]
        return "\n".join(lines)


VERDICTS = {
    True: "the training is the same as on one process",
    False: "the training is not the same as on one process",
    None: "no mistake was found, but not everything was compared",
}


def described(x: Quantity) -> str:
    """Return a quantity in words.

    Examples:
        >>> described(Quantity("value of the loss", reason="no step was finished"))
        'not compared: no step was finished'
    """
    if x.ratio is None:
        return f"not compared: {x.reason}"
    result = x.ratio
    numbers = (
        f"ratio {result.ratio:.4g}, cosine {result.cosine:.4f}, error {result.error:.1e}, tolerance {x.tolerance:.1e}"
    )
    return f"{'same' if x.ok else 'differs'}, {numbers}"


def without_weights(worlds: Sequence[WorldReport]) -> None:
    """Drop findings of a factor that is equal for different numbers of processes: it is a weight."""
    if len(worlds) < 2 or len({tuple(round(y, 4) for y in x.factors) for x in worlds}) > 1:
        return
    for world in worlds:
        kept = [x for x in world.findings if x.mistake not in ("times W", "divided by W")]
        if len(kept) < len(world.findings):
            world.notes.append("the loss has the same factor for all numbers of processes: a weight, not a mistake")
        world.findings = kept


def _quantity_as_dict(x: Quantity) -> dict[str, Any]:
    numbers = {} if x.ratio is None else {key: _finite(value) for key, value in vars(x.ratio).items()}
    return {"name": x.name, "ok": x.ok, **numbers, "tolerance": x.tolerance, "reason": x.reason, "step": x.step + 1}


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None
