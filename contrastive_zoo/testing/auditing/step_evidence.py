"""The evidence of one step: what all ranks recorded, the same step in one process, and repetitions of it."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from contrastive_zoo.testing.auditing.merging import NotComparable
from contrastive_zoo.testing.auditing.records import Step
from contrastive_zoo.testing.auditing.replay import OneProcess, Repeated
from contrastive_zoo.testing.evidence import Ratio

REPETITIONS = 5
"""Repetitions of a step with changes of up to half a unit of rounding, from which the tolerance is derived."""

NOISE_FACTOR, ROUNDING_FACTOR = 10.0, 100.0
"""A tolerance is this often the largest difference between repetitions, plus this often the unit of rounding."""


class StepEvidence:
    """One step of all ranks.

    Args:
        ranks: as each rank recorded it.
        groups: for each trained parameter, ``"encoder"`` or ``"loss"``.
        one_process: repeats the step; None if it cannot be repeated.
        reason: why the step cannot be repeated.

    Attributes:
        together: the step in one process, the encoders on all samples together; None if it was not repeated.
        repetitions: of the truth, with changes of up to half a unit of rounding.
    """

    def __init__(
        self, ranks: list[Step], groups: dict[str, str], one_process: OneProcess | None, reason: str = ""
    ) -> None:
        self.ranks, self.groups, self.one_process, self.reason = ranks, groups, one_process, reason
        self.world_size = len(ranks)
        self.together, problem = self._repeated(ranks)
        self.reason = reason or ("" if self.truth else problem)
        self.repetitions: list[Repeated] = []
        for seed in range(REPETITIONS if self.truth else 0):
            noise = torch.Generator().manual_seed(seed)
            repeated, _ = self._repeated(ranks, by_shard=self.draws, noise=noise)
            self.repetitions += [] if repeated is None else [repeated]
        if self._has_low_precision and not self.draws and self.by_shard and not ranks[0].batch_norms:
            self.repetitions.append(self.by_shard)  # 16 bits round the gradient of each shard

    def _repeated(self, ranks: list[Step], **settings: Any) -> tuple[Repeated | None, str]:
        """Return the step in one process, or None and why it was not repeated."""
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
    def draws(self) -> bool:
        """Whether an encoder drew random numbers, as dropout does: the masks of each rank are then used again."""
        return any(call.drew for step in self.ranks for micro in step.micro_batches for call in micro.encoders)

    @property
    def _has_low_precision(self) -> bool:
        """Whether encoders compute in 16 bits."""
        encoders = [call for micro in self.ranks[0].micro_batches for call in micro.encoders]
        return any(call.autocast[1] for call in encoders) or self.eps > 1e-4

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
    def values(self) -> Tensor:
        """The values of the losses on each rank, [W, losses]."""
        values = [[float("nan") if x.output is None else float(x.output) for x in step.losses] for step in self.ranks]
        return torch.tensor(values, dtype=torch.float64)

    def names(self, group: str) -> list[str]:
        """Return the names of the parameters of a group."""
        return [name for name, x in self.groups.items() if x == group and name in self.ranks[0].state]

    def lacks_terms(self, names: Sequence[str]) -> bool:
        """Return whether these parameters get gradients from terms that are not repeated."""
        return any(name in step.other_terms for step in self.ranks for name in names)

    def is_sharded(self, names: Sequence[str]) -> bool:
        """Return whether ranks hold parts of these parameters."""
        return any(name in step.sharded for step in self.ranks for name in names)

    def flat(self, tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
        """Return these parameters' tensors as one vector; a missing one counts as zero."""
        like = self.ranks[0].state
        return torch.cat([tensors.get(name, torch.zeros_like(like[name])).flatten().double() for name in names])

    def reference(self, of: str) -> tuple[Tensor, float]:
        """Return the ``"value"`` of one process, or the gradient of a group, and the largest error of a right one."""
        assert self.truth is not None
        names = [] if of == "value" else self.names(of)
        truth, *repeated = [
            self.flat(x.gradients, names) if names else torch.tensor(x.values, dtype=torch.float64)
            for x in (self.truth, *self.repetitions)
        ]
        return truth, self.tolerance(truth, repeated)

    def tolerance(self, expected: Tensor, repeated: Sequence[Tensor]) -> float:
        """Return the largest relative error of a right result, from repetitions of the expected one."""
        noise = max((Ratio.between(x, expected).error for x in repeated), default=0.0)
        return NOISE_FACTOR * noise + ROUNDING_FACTOR * self.eps
