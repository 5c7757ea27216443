"""The arguments of one call on all samples, from those of the same call on every rank.

A loss receives embeddings. Where these are outputs of encoders, of one rank or of several, those of the repeated step take
their place, so that gradients reach the encoders.
"""

import math
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils._pytree import tree_leaves, tree_map

from contrastive_zoo.testing.auditing.records import Call

Transform = Callable[[Tensor], Tensor]

TRANSFORMS: tuple[Transform, ...] = (lambda x: x, lambda x: normalize(x.float() if x.dtype.itemsize < 4 else x))
"""What a script may do with embeddings before the loss, besides selecting and gathering rows."""

LARGEST_SEARCH = 2**26
"""Number of distances beyond which the rows of an argument are not searched among the outputs."""


class NotComparable(Exception):
    """A step, or a part of it, that cannot be repeated in one process; the message is the reason."""


class Source(NamedTuple):
    """Rows of the outputs of all ranks: ``transform(outputs)[rows]``."""

    rows: Tensor  # indices into the outputs of all ranks, concatenated call by call and in rank order
    transform: Transform
    is_local: bool  # whether all rows are those of the rank that received them
    leaf: int = -1  # index of the output tensor, if the argument is all of one


class Outputs:
    """The output tensors of the encoders in one micro-batch; of each, its rows on each rank."""

    def __init__(self) -> None:
        self.leaves: list[list[Tensor]] = []

    def add(self, outputs: Sequence[Any]) -> None:
        tensors = [[x for x in tree_leaves(y) if isinstance(x, Tensor) and x.is_floating_point()] for y in outputs]
        self.leaves += map(list, zip(*tensors, strict=True))

    def table(self, width: int, rank: int | None = None) -> tuple[Tensor, Tensor] | None:
        """Return all rows with this number of elements, and their indices; or those of one rank."""
        rows, indices, start = [], [], 0
        for leaf in self.leaves:
            for r, x in enumerate(leaf if _is_batch(leaf, width) else ()):
                if rank in (None, r):
                    rows.append(x.reshape(len(x), width))
                    indices.append(torch.arange(start, start + len(x)))
                start += len(x)
        dtypes = {x.dtype for x in rows}
        return (torch.cat(rows), torch.cat(indices)) if len(dtypes) == 1 else None

    def find(self, x: Tensor, rank: int, used: Container[int]) -> Source | None:
        """Return where the rows of an argument that a rank received come from; None if they are not rows of the outputs.

        Of several equal output tensors, one that no other argument is (not in ``used``) comes first.
        """
        for leaf in sorted(range(len(self.leaves)), key=lambda i: i in used):
            if (source := self._whole(x, rank, leaf)) is not None:
                return source
        width = _width(x)
        for table, is_local in ((self.table(width, rank), True), (self.table(width), False)):
            for transform in TRANSFORMS if table is not None else ():
                assert table is not None
                result = _search(x.reshape(len(x), width), transform(table[0]).to(x.dtype))
                if result is not None:
                    return Source(table[1][result], transform, is_local)
        return None

    def _whole(self, x: Tensor, rank: int, leaf: int) -> Source | None:
        """Return the source of an argument that is all of one output tensor of its rank."""
        y = self.leaves[leaf][rank]
        if y.ndim == 0 or y.numel() != x.numel() or len(y) != len(x) or not len(x):
            return None
        earlier = [z for z in self.leaves[:leaf] if _is_batch(z, _width(y))]
        start = sum(len(z) for ranks in earlier for z in ranks) + sum(map(len, self.leaves[leaf][:rank]))
        for transform in TRANSFORMS:
            if _equal(x.reshape(len(x), -1), transform(y.reshape(len(y), -1)).to(x.dtype)):
                return Source(torch.arange(start, start + len(x)), transform, is_local=True, leaf=leaf)
        return None


class Merge:
    """Merge the calls that all ranks made of one module, after encoders with these outputs, recorded and repeated."""

    def __init__(self, calls: Sequence[Call], recorded: Outputs, repeated: Outputs) -> None:
        self.calls, self.recorded, self.repeated = calls, recorded, repeated
        self.unlinked: list[tuple[int, ...]] = []  # shapes of trained arguments that are no rows of the outputs
        arguments = [call.arguments for call in calls]
        if len({(len(x.leaves), tuple(x.trained)) for x in arguments}) > 1:
            raise NotComparable("ranks call the same module with different arguments")
        self.leaves = list(zip(*(x.leaves for x in arguments), strict=True))
        self.trained = arguments[0].trained
        self.sources: list[list[Source] | None] = []
        for leaf, is_trained in zip(self.leaves, self.trained, strict=True):
            self.sources.append(self._source(leaf, is_trained))
        # whether a rank received rows of another rank
        self.is_gathered = any(not x.is_local for ranks in self.sources if ranks is not None for x in ranks)
        tensors = [leaf for leaf in self.leaves if all(isinstance(x, Tensor) and x.ndim for x in leaf)]
        self.sizes = [len(x) for x in tensors[0]] if tensors else []  # each rank's number of samples

    def _source(self, leaf: tuple[Any, ...], is_trained: bool) -> list[Source] | None:
        if not all(isinstance(x, Tensor) and x.is_floating_point() and x.ndim for x in leaf):
            return None
        used = {x.leaf for ranks in self.sources if ranks is not None for x in ranks}
        result = [self.recorded.find(x, rank, used) for rank, x in enumerate(leaf)]
        sources = [x for x in result if x is not None]
        if not is_trained:  # a stopped gradient, unless the gather has lost it
            return sources if len(sources) == len(leaf) and any(not x.is_local for x in sources) else None
        if len(sources) < len(leaf):
            self.unlinked.append(tuple(leaf[0].shape))
            return None
        filled = next((x for x, y in zip(sources, leaf, strict=True) if len(y)), sources[0])
        return [x._replace(transform=filled.transform) for x in sources]

    def of_all_ranks(self, device: torch.device) -> tuple[Any, Any]:
        """Return ``(args, kwargs)`` of one process that holds all ranks' samples."""
        leaves = zip(self.leaves, self.trained, self.sources, strict=True)
        return self.calls[0].arguments.rebuild([self._merged(*x, device) for x in leaves])

    def of_rank(self, rank: int, device: torch.device) -> tuple[Any, Any]:
        """Return ``(args, kwargs)`` of one rank."""
        leaves = []
        for leaf, sources in zip(self.leaves, self.sources, strict=True):
            x = leaf[rank]
            leaves.append(self._select([sources[rank]], x) if sources else _to(x, device))
        return self.calls[rank].arguments.rebuild(leaves)

    def _merged(
        self, leaf: tuple[Any, ...], is_trained: bool, sources: list[Source] | None, device: torch.device
    ) -> Any:
        first = leaf[0]
        if sources is not None:
            return self._select(sources if all(x.is_local for x in sources) else sources[:1], first)
        if not isinstance(first, Tensor):
            return first
        if first.ndim == 0:
            return self._scalar(first, device) if is_trained else _to(first, device)
        equal = all(x.shape == first.shape and torch.equal(x, first) for x in leaf)
        per_sample = [len(x) for x in leaf] == self.sizes
        if equal and (self.is_gathered or not per_sample):
            return _to(first, device)
        is_tokens = all(x.ndim == 2 and not x.is_floating_point() for x in leaf)  # [n, length], padded with zeros
        try:
            x = _to(torch.cat(_padded(leaf) if is_tokens else leaf), device)
        except RuntimeError as error:
            raise NotComparable(f"the ranks' inputs cannot be concatenated: {error}") from error
        return x.requires_grad_() if is_trained else x

    def _select(self, sources: Sequence[Source], like: Tensor) -> Tensor:
        table = self.repeated.table(_width(like))
        assert table is not None
        rows = torch.cat([x.rows for x in sources])
        selected = sources[0].transform(table[0])[rows.to(table[0].device)]
        return selected.reshape(len(rows), *like.shape[1:]).to(like.dtype)

    def _scalar(self, x: Tensor, device: torch.device) -> Tensor:
        """Return the repeated output of no dimension whose recorded one, or its exponential, is this argument."""
        for leaf, repeated in zip(self.recorded.leaves, self.repeated.leaves, strict=False):
            for transform in (lambda y: y, torch.exp):
                if leaf[0].ndim == 0 and bool(torch.isclose(transform(leaf[0]).to(x.dtype), x)):
                    return transform(repeated[0]).to(x.dtype)
        self.unlinked.append(())
        return _to(x, device)


def concatenated_outputs(outputs: Sequence[Any]) -> Any:
    """Concatenate the outputs of one encoder for each rank's samples, padded; a scalar is that of rank 0."""
    return tree_map(lambda *x: torch.cat(_padded(x)) if isinstance(x[0], Tensor) and x[0].ndim else x[0], *outputs)


def _padded(parts: Sequence[Tensor]) -> list[Tensor]:
    """Pad dimension 1 of all tensors to the same length."""
    if parts[0].ndim < 2:
        return list(parts)
    length = max(x.shape[1] for x in parts)
    return [torch.nn.functional.pad(x, (*([0, 0] * (x.ndim - 2)), 0, length - x.shape[1])) for x in parts]


def _width(x: Tensor) -> int:
    """Return the number of elements of a row."""
    return math.prod(x.shape[1:])


def _is_batch(leaf: Sequence[Tensor], width: int) -> bool:
    return all(x.ndim > 0 and _width(x) == width for x in leaf)


def _search(rows: Tensor, table: Tensor) -> Tensor | None:
    """Return for every row its index in the table; None if a row is not there."""
    if len(rows) == 0 or (len(rows) == len(table) and _equal(rows, table)):
        return torch.arange(len(rows))
    if len(table) == 0 or len(rows) * len(table) > LARGEST_SEARCH:
        return None
    nearest = torch.cdist(rows.double(), table.double(), compute_mode="donot_use_mm_for_euclid_dist").argmin(1)
    return nearest if _equal(rows, table[nearest]) else None


def _equal(x: Tensor, y: Tensor) -> bool:
    """Return whether tensors are equal up to the rounding of a normalisation."""
    tolerance = 8 * torch.finfo(x.dtype).eps
    return bool(torch.allclose(x, y, rtol=tolerance, atol=tolerance * float(y.abs().max() if y.numel() else 0)))


def _to(x: Any, device: torch.device) -> Any:
    return x.to(device, copy=True) if isinstance(x, Tensor) else x
