"""Find where the embeddings that a loss received come from: which outputs of encoders, of which rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils._pytree import tree_leaves

Transform = Callable[[Tensor], Tensor]

TRANSFORMS: tuple[Transform, ...] = (lambda x: x, lambda x: normalize(x.float() if x.dtype.itemsize < 4 else x))
"""What a script may do with embeddings before the loss, besides selecting and gathering rows."""

LARGEST_SEARCH = 2**26
"""Number of distances beyond which the rows of an argument are not searched among the outputs."""


@dataclass
class Source:
    """Rows of the outputs of all ranks: ``transform(outputs)[rows]``.

    Attributes:
        rows: indices into the outputs of all ranks, concatenated call by call and in rank order.
        transform: applied to the outputs.
        is_local: whether all rows are those of the rank that received them.
        leaf: index of the output tensor, if the argument is all of one.
    """

    rows: Tensor
    transform: Transform
    is_local: bool
    leaf: int = -1


class Outputs:
    """The outputs of the encoders in one micro-batch.

    Args:
        calls: for each call, the output on each rank.
    """

    def __init__(self, calls: Sequence[Sequence[Any]]) -> None:
        self.leaves: list[list[Tensor]] = []  # for each output tensor, its rows on each rank
        for ranks in calls:
            for leaf in zip(*(_tensors(output) for output in ranks), strict=True):
                self.leaves.append(list(leaf))

    def table(self, width: int, rank: int | None = None) -> tuple[Tensor, Tensor] | None:
        """Return all rows with this number of elements, and their indices; or those of one rank."""
        rows, indices, start = [], [], 0
        for leaf in self.leaves:
            if not _is_batch(leaf, width):
                continue
            for r, x in enumerate(leaf):
                if rank in (None, r):
                    rows.append(x.reshape(len(x), width))
                    indices.append(torch.arange(start, start + len(x)))
                start += len(x)
        dtypes = {x.dtype for x in rows}
        return (torch.cat(rows), torch.cat(indices)) if len(dtypes) == 1 else None

    def find(self, x: Tensor, rank: int, used: Container[int] = ()) -> Source | None:
        """Return where the rows of an argument come from; None if they are not rows of the outputs.

        Args:
            x: the argument.
            rank: that received it.
            used: output tensors that another argument is; where several are equal, others come first.
        """
        if x.ndim == 0:
            return None
        for leaf in sorted(range(len(self.leaves)), key=lambda i: i in used):
            if (source := self._whole(x, rank, leaf)) is not None:
                return source
        rows = x.reshape(len(x), -1) if len(x) else x.new_zeros(0, row_width(x))
        for table, is_local in ((self.table(row_width(x), rank), True), (self.table(row_width(x)), False)):
            for transform in TRANSFORMS if table is not None else ():
                assert table is not None
                result = _search(rows, transform(table[0]).to(x.dtype))
                if result is not None:
                    return Source(table[1][result], transform, is_local)
        return None

    def _whole(self, x: Tensor, rank: int, leaf: int) -> Source | None:
        """Return the source of an argument that is all of one output tensor of its rank."""
        y = self.leaves[leaf][rank]
        if y.ndim == 0 or y.numel() != x.numel() or len(y) != len(x) or not len(x):
            return None
        earlier = [z for z in self.leaves[:leaf] if _is_batch(z, row_width(y))]
        start = sum(len(z) for ranks in earlier for z in ranks) + sum(map(len, self.leaves[leaf][:rank]))
        for transform in TRANSFORMS:
            if _equal(x.reshape(len(x), -1), transform(y.reshape(len(y), -1)).to(x.dtype)):
                return Source(torch.arange(start, start + len(x)), transform, is_local=True, leaf=leaf)
        return None

    def scalar(self, x: Tensor) -> tuple[int, Transform] | None:
        """Return the output of no dimension that equals a scalar argument, and what was done with it."""
        for index, leaf in enumerate(self.leaves):
            for transform in (lambda y: y, torch.exp):
                if leaf[0].ndim == 0 and x.ndim == 0 and bool(torch.isclose(transform(leaf[0]).to(x.dtype), x)):
                    return index, transform
        return None


def _tensors(output: Any) -> list[Tensor]:
    return [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]


def _is_batch(leaf: list[Tensor], width: int) -> bool:
    return all(x.ndim > 0 and row_width(x) == width for x in leaf)


def row_width(x: Tensor) -> int:
    """Return the number of elements of a row."""
    return math.prod(x.shape[1:])


def _search(rows: Tensor, table: Tensor) -> Tensor | None:
    """Return for every row its index in the table; None if a row is not there."""
    if len(rows) == len(table) and _equal(rows, table):
        return torch.arange(len(rows))
    if len(rows) == 0:
        return torch.arange(0)
    if len(table) == 0 or len(rows) * len(table) > LARGEST_SEARCH:
        return None
    nearest = torch.cdist(rows.double(), table.double(), compute_mode="donot_use_mm_for_euclid_dist").argmin(1)
    return nearest if _equal(rows, table[nearest]) else None


def _equal(x: Tensor, y: Tensor) -> bool:
    """Return whether tensors are equal up to the rounding of a normalisation."""
    tolerance = 8 * torch.finfo(x.dtype).eps
    return bool(torch.allclose(x, y, rtol=tolerance, atol=tolerance * float(y.abs().max() if y.numel() else 0)))
