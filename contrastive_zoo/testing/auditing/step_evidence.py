"""The evidence of one step: what all ranks recorded, the same step in one process, and repetitions of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from contrastive_zoo.testing.auditing.merging import NotComparable
from contrastive_zoo.testing.auditing.one_process import OneProcess, Repeated
from contrastive_zoo.testing.auditing.records import Record, Step

REPETITIONS = 5
"""Repetitions of a step with changes of up to half a unit of rounding, from which the tolerance is derived."""


@dataclass
class StepEvidence:
    """One step of all ranks.

    Attributes:
        ranks: as each rank recorded it.
        groups: for each trained parameter, ``"encoder"`` or ``"loss"``.
        one_process: repeats the step; None if it cannot be repeated.
        reason: why the step was not repeated.
        together: the step in one process, the encoders on all samples together.
        repetitions: of the truth, with changes of up to half a unit of rounding.
    """

    ranks: list[Step]
    groups: dict[str, str]
    one_process: OneProcess | None
    reason: str = ""
    together: Repeated | None = field(default=None, init=False)
    repetitions: list[Repeated] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.together, reason = self._repeated(self.ranks)
        self.reason = self.reason or ("" if self.truth else reason)
        for seed in range(REPETITIONS if self.truth else 0):
            noise = torch.Generator().manual_seed(seed)
            repeated, _ = self._repeated(self.ranks, by_shard=self.draws, noise=noise)
            self.repetitions += [] if repeated is None else [repeated]
        if self.has_low_precision and not self.draws and self.by_shard and not self.ranks[0].batch_norms:
            self.repetitions.append(self.by_shard)  # 16 bits round the gradient of each shard

    def _repeated(self, ranks: list[Step], **settings: Any) -> tuple[Repeated | None, str]:
        if self.one_process is None:
            return None, self.reason
        try:
            return self.one_process.repeat(ranks, **settings), ""
        except NotComparable as problem:
            return None, str(problem)

    @cached_property
    def by_shard(self) -> Repeated | None:
        """The step in one process, the encoders on the samples of each rank in turn, with its random numbers."""
        return self._repeated(self.ranks, by_shard=True)[0]

    @cached_property
    def alone(self) -> list[Repeated | None]:
        """The step of each rank in a training of its samples only."""
        return [self._repeated([rank])[0] for rank in self.ranks]

    @property
    def world_size(self) -> int:
        """The number of ranks W."""
        return len(self.ranks)

    @property
    def draws(self) -> bool:
        """Whether an encoder drew random numbers, as dropout does: the masks of each rank are then used again."""
        return any(call.drew for step in self.ranks for micro in step.micro_batches for call in micro.encoders)

    @property
    def has_low_precision(self) -> bool:
        """Whether encoders compute in 16 bits."""
        return (
            any(call.autocast[1] for micro in self.ranks[0].micro_batches for call in micro.encoders) or self.eps > 1e-4
        )

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
        return [name for name, result in self.groups.items() if result == group and name in state]

    def lacks_terms(self, names: Sequence[str]) -> bool:
        """Return whether these parameters get gradients from terms that are not repeated."""
        return any(name in step.other_terms for step in self.ranks for name in names)

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
    groups = records[0].parameters
    return [StepEvidence([x.steps[i] for x in records], groups, one_process, reason) for i in range(count)]
