"""The gathered rows of one step, so that several losses of the same rows gather them once."""

from collections.abc import Callable

import torch
from torch import Tensor

from contrastive_zoo.derivations import Derivations
from contrastive_zoo.world import Shards

Fetch = Callable[[Tensor, Shards], Tensor]
"""Gathers: from this rank's rows and their shard sizes to the rows of all ranks."""


class GatherCache:
    """Stores gathered rows; rows that are derived from gathered ones are computed.

    Keys are the ids of this rank's tensors: equal tensors are not the same entry, and a comparison would cost a pass over
    them. Each entry holds its tensor, so that no other tensor gets its id.
    """

    def __init__(self, derivations: Derivations) -> None:
        self._gathered: dict[int, tuple[Tensor, Tensor]] = {}
        self._derivations = derivations

    def gather(self, rows: Tensor, shards: Shards, fetch: Fetch) -> Tensor:
        """Return the rows of all ranks: stored, derived from stored rows, or fetched. Do not write to them."""
        if id(rows) not in self._gathered:
            self._gathered[id(rows)] = rows, self._computed(rows, shards, fetch)
        return self._gathered[id(rows)][1]

    def clear(self) -> None:
        """Drop all tensors: a graph that waits for its backward pass may hold the cache."""
        self._gathered.clear()

    def _computed(self, rows: Tensor, shards: Shards, fetch: Fetch) -> Tensor:
        """Return the rows of all ranks, derived if possible, otherwise fetched."""
        found = self._derivations.of(rows)
        if found is None:
            return fetch(rows, shards)
        function, sources = found
        of_source = Shards(tuple(size // len(sources) for size in shards.sizes), shards.rank)
        parts = (self.gather(source, of_source, fetch).split(list(of_source.sizes)) for source in sources)
        with torch.no_grad():
            return torch.cat([function(*of_rank) for of_rank in zip(*parts, strict=True)])
