"""One sampler on one dataset, run as each rank of worlds of several sizes; no process is started."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from contrastive_zoo.data.batch_sampler import BaseBatchSampler
from contrastive_zoo.ranks.world import World

Parts: TypeAlias = list[list[list[int]]]
"""The batches of each rank, as sample indices."""


@dataclass(frozen=True)
class SamplerTrial:
    """A sampler under test. Invariants read what its ranks yield.

    Args:
        make: constructs the sampler as the given world sees it; the settings are the same for every world.
        samples: the indices that an epoch has once each.
        world_size: W.
        other_world_size: the number of ranks that a run is resumed on.
        epoch: the epoch under test.
        step: batches trained before the run is resumed, modulo the number of batches.
        rank_weights: each rank's share, W of them; None is an even split.
        shuffled: whether each epoch has an order of its own.
        labels: the class of each sample, if the sampler guarantees positives.
        group: for a sampler by class, (m, p).
        columns: values of which none occurs twice in a batch, [samples, columns].
    """

    make: Callable[[World, Sequence[float] | None], BaseBatchSampler]
    samples: Sequence[int]
    world_size: int
    other_world_size: int = 1
    epoch: int = 0
    step: int = 0
    rank_weights: Sequence[float] | None = None
    shuffled: bool = True
    labels: NDArray[np.int64] | None = None
    group: tuple[int, int] | None = None
    columns: NDArray[np.int64] | None = None

    def sampler(self, rank: int, world_size: int) -> BaseBatchSampler:
        """Return the sampler of one rank; in a world of another size the split is even."""
        weights = self.rank_weights if world_size == self.world_size else None
        return self.make(World(rank, world_size), weights)

    def parts(self, world_size: int, epoch: int, state: Mapping[str, Any] | None = None) -> Parts:
        """Return what each rank yields in an epoch, or from a loaded position on."""
        found = []
        for rank in range(world_size):
            sampler = self.sampler(rank, world_size)
            if state is None:
                sampler.set_epoch(epoch)
            else:
                sampler.load_state_dict(state)
            found.append(list(sampler))
        return found

    def global_batches(self, world_size: int, epoch: int, state: Mapping[str, Any] | None = None) -> list[list[int]]:
        """Return the parts of all ranks concatenated in rank order, batch by batch."""
        parts = self.parts(world_size, epoch, state)
        number = max(map(len, parts))
        return [
            [x for of_rank in parts for x in (of_rank[step] if step < len(of_rank) else [])] for step in range(number)
        ]

    def on_one_process(self, epoch: int | None = None) -> list[list[int]]:
        """Return the batches of an epoch on one process."""
        return self.parts(1, self.epoch if epoch is None else epoch)[0]
