"""The gathered rows of one step, so that several losses of the same rows gather them once."""

from collections.abc import Callable

import torch
from torch import Tensor

from contrastive_zoo.world import Shards

Fetch = Callable[[Tensor, Shards], Tensor]
"""Gathers: from this rank's rows and their shard sizes to the rows of all ranks."""


class GatherCache:
    """Stores gathered rows, and functions that compute other rows from them.

    Keys are the ids of this rank's tensors: equal tensors are not the same entry, and a comparison would cost a pass over
    them. Each entry holds its tensor, so that no other tensor gets its id.
    """

    def __init__(self) -> None:
        self._gathered: dict[int, tuple[Tensor, Tensor]] = {}
        self._derived: dict[int, tuple[Tensor, Callable[..., Tensor], tuple[Tensor, ...]]] = {}

    def gather(self, rows: Tensor, shards: Shards, fetch: Fetch) -> Tensor:
        """Return the rows of all ranks: stored, derived from stored rows, or fetched. Do not write to them."""
        if id(rows) not in self._gathered:
            self._gathered[id(rows)] = rows, self._computed(rows, shards, fetch)
        return self._gathered[id(rows)][1]

    def derive(self, function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        """Return ``function(*rows)``, and store the function, so that the result need not be gathered if ``rows`` are."""
        result = function(*rows)
        if all(result is not x for x in rows):
            self._derived[id(result)] = result, function, rows
        return result

    def clear(self) -> None:
        """Drop all tensors: a graph that waits for its backward pass may hold the cache."""
        self._gathered.clear()
        self._derived.clear()

    def _computed(self, rows: Tensor, shards: Shards, fetch: Fetch) -> Tensor:
        """Return the rows of all ranks, derived if possible, otherwise fetched."""
        if id(rows) not in self._derived:
            return fetch(rows, shards)
        _, function, sources = self._derived[id(rows)]
        of_source = Shards(tuple(size // len(sources) for size in shards.sizes), shards.rank)
        parts = (self.gather(source, of_source, fetch).split(list(of_source.sizes)) for source in sources)
        with torch.no_grad():
            return torch.cat([function(*of_rank) for of_rank in zip(*parts, strict=True)])
