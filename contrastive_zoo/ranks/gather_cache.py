"""The gathered rows of one step, and what is derived from them, so that losses of the same rows gather them once."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from contrastive_zoo.ranks.world import Shards

Function = Callable[..., Tensor]
"""Computes rows from one or several tensors of rows of equal length, row by row, or concatenates them."""


@dataclass
class Derivations:
    """Records of each derived tensor the function and its arguments, as long as the tensor exists.

    Examples:
        >>> derivations = Derivations()
        >>> unit = derivations.derive(lambda x: x.float() / 2, torch.tensor([2.0], dtype=torch.bfloat16))
        >>> both = derivations.derive(lambda *x: torch.cat(x), unit, unit)
        >>> sent, restore = derivations.narrowest(both)
        >>> sent, restore(sent)
        (tensor([2., 2.], dtype=torch.bfloat16), tensor([1., 1.]))
    """

    _found: WeakTensorKeyDictionary | None = None
    """None as long as nothing is derived that may be sent, as in most steps."""

    def derive(self, function: Function, *rows: Tensor) -> Tensor:
        """Return ``function(*rows)``, and record it unless it is one of ``rows``."""
        result = function(*rows)
        if all(result is not x for x in rows):
            self._found = WeakTensorKeyDictionary() if self._found is None else self._found
            self._found[result] = function, rows
        return result

    def of(self, rows: Tensor) -> tuple[Function, tuple[Tensor, ...]] | None:
        """Return the function and the arguments that ``rows`` were derived from, None if they were not."""
        results: tuple[Function, tuple[Tensor, ...]] | None = None if self._found is None else self._found.get(rows)
        return results

    def narrowest(self, rows: Tensor) -> tuple[Tensor, Function]:
        """Return the rows of 16 bits that ``rows`` were derived from, and the function; ``rows`` if there are none.

        Sources that were concatenated are concatenated here, too. The function holds no tensor.
        """
        results = self.of(rows)
        if results is None:
            return rows, unchanged
        function, sources = results
        narrow, functions = zip(*map(self.narrowest, sources), strict=True)
        if any(x.dtype.itemsize != 2 for x in narrow):
            return rows, unchanged

        def restore(received: Tensor) -> Tensor:
            count = len(received) // len(functions)
            parts = (received[i * count : (i + 1) * count] for i in range(len(functions)))
            return function(*(of_source(x) for of_source, x in zip(functions, parts, strict=True)))

        return (narrow[0] if len(narrow) == 1 else torch.cat(narrow)), restore


def unchanged(rows: Tensor) -> Tensor:
    """Return ``rows``, which were derived from no others.

    Examples:
        >>> unchanged(torch.ones(1))
        tensor([1.])
    """
    return rows


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
        results = self._derivations.of(rows)
        if results is None:
            return fetch(rows, shards)
        function, sources = results
        of_source = Shards(tuple(size // len(sources) for size in shards.sizes), shards.rank)
        parts = (self.gather(source, of_source, fetch).split(list(of_source.sizes)) for source in sources)
        with torch.no_grad():
            return torch.cat([function(*of_rank) for of_rank in zip(*parts, strict=True)])
