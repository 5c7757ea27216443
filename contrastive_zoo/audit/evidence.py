"""The evidence of one step: what all ranks recorded, the same step in one process, and repetitions of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from contrastive_zoo.audit.merging import NotComparable
from contrastive_zoo.audit.one_process import OneProcess, Repeated
from contrastive_zoo.audit.records import Record, Step

REPETITIONS = 2
"""Repetitions of a step with changes of one unit of rounding, from which the tolerance is derived."""


@dataclass
class StepEvidence:
    """One step of all ranks.

    Attributes:
        ranks: as each rank recorded it.
        groups: for each trained parameter, ``"encoder"`` or ``"loss"``.
        together: the step in one process, the encoders on all samples together; None if it cannot be repeated.
        by_shard: the same, the encoders on the samples of one rank after the other, with that rank's random numbers.
        repetitions: of the truth, with changes of one unit of rounding.
        alone: the step of each rank in a training of its samples only.
        reason: why the step was not repeated.
    """

    ranks: list[Step]
    groups: dict[str, str]
    together: Repeated | None = None
    by_shard: Repeated | None = None
    repetitions: list[Repeated] = field(default_factory=list)
    alone: list[Repeated | None] = field(default_factory=list)
    reason: str = ""

    @property
    def world_size(self) -> int:
        """The number of ranks W."""
        return len(self.ranks)

    @property
    def draws(self) -> bool:
        """Whether an encoder drew random numbers, as dropout does: the masks of each rank are then used again."""
        return any(call.drew for step in self.ranks for micro in step.micro_batches for call in micro.encoders)

    @property
    def truth(self) -> Repeated | None:
        """The step in one process."""
        return self.by_shard if self.draws else self.together

    @cached_property
    def eps(self) -> float:
        """The unit of rounding of the parameters."""
        dtypes = [self.ranks[0].state[name].dtype for name in self.groups if name in self.ranks[0].state]
        return max((torch.finfo(x).eps for x in dtypes), default=torch.finfo(torch.float32).eps)

    @property
    def values(self) -> list[list[float]]:
        """The values of the losses on each rank."""
        return [[float("nan") if x.output is None else float(x.output) for x in step.losses] for step in self.ranks]

    def names(self, group: str) -> list[str]:
        """Return the names of the parameters of a group."""
        state = self.ranks[0].state
        return [name for name, found in self.groups.items() if found == group and name in state]

    def is_sharded(self, names: Sequence[str]) -> bool:
        """Return whether ranks hold parts of these parameters."""
        return any(name in step.sharded for step in self.ranks for name in names)


def gather_evidence(records: Sequence[Record], one_process: OneProcess | None, reason: str) -> list[StepEvidence]:
    """Repeat the steps that all ranks finished.

    Args:
        records: of all ranks.
        one_process: the modules of one rank; None if they cannot be copied.
        reason: why there is no ``one_process``.
    """
    count = min(len(x.steps) for x in records)
    steps = [StepEvidence([x.steps[i] for x in records], records[0].parameters, reason=reason) for i in range(count)]
    for step in steps if one_process is not None else []:
        assert one_process is not None
        try:
            _repeat(step, one_process)
        except NotComparable as problem:
            step.together, step.by_shard, step.reason = None, None, str(problem)
    return steps


def _repeat(step: StepEvidence, one_process: OneProcess) -> None:
    step.by_shard = one_process.repeat(step.ranks, by_shard=True)
    try:
        step.together = one_process.repeat(step.ranks)
    except NotComparable:
        if not step.draws:
            raise
    for seed in range(REPETITIONS):
        noise = torch.Generator().manual_seed(seed)
        step.repetitions.append(one_process.repeat(step.ranks, by_shard=step.draws, noise=noise))
    for rank in step.ranks:
        try:
            step.alone.append(one_process.repeat([rank]))
        except NotComparable:
            step.alone.append(None)
