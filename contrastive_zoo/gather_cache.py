"""Rows of all ranks that one step has gathered, so that losses of the same rows do not send them again."""

from collections.abc import Callable

import torch
from torch import Tensor

from contrastive_zoo.world import Shards

Fetch = Callable[[Tensor, Shards], Tensor]
"""This rank's rows and their split to the rows of all ranks."""


class GatherCache:
    """What has been gathered, and how other rows are made of it, row by row.

    Entries are found by the identity of this rank's tensor and hold on to it, so that no other tensor gets its id.
    """

    def __init__(self) -> None:
        self._gathered: dict[int, tuple[Tensor, Tensor]] = {}
        self._derived: dict[int, tuple[Tensor, Callable[..., Tensor], tuple[Tensor, ...]]] = {}

    def gather(self, rows: Tensor, shards: Shards, fetch: Fetch) -> Tensor:
        """The rows of all ranks: gathered before, derived from such, or fetched. They must not be written to."""
        if id(rows) not in self._gathered:
            self._gathered[id(rows)] = rows, self._made(rows, shards, fetch)
        return self._gathered[id(rows)][1]

    def derive(self, function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        """``function(*rows)``, and how it is made, so that it need not be gathered where ``rows`` are."""
        result = function(*rows)
        if all(result is not x for x in rows):
            self._derived[id(result)] = result, function, rows
        return result

    def clear(self) -> None:
        """Let go of everything: a graph that waits for its backward pass may hold on to the cache."""
        self._gathered.clear()
        self._derived.clear()

    def _made(self, rows: Tensor, shards: Shards, fetch: Fetch) -> Tensor:
        if id(rows) not in self._derived:
            return fetch(rows, shards)
        _, function, sources = self._derived[id(rows)]
        of_source = Shards(tuple(size // len(sources) for size in shards.sizes), shards.rank)
        parts = (self.gather(source, of_source, fetch).split(list(of_source.sizes)) for source in sources)
        with torch.no_grad():
            return torch.cat([function(*of_rank) for of_rank in zip(*parts, strict=True)])
