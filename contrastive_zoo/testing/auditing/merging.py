"""The arguments of one call on all samples, from those of the same call on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from contrastive_zoo.testing.auditing.links import Outputs, Source, row_width
from contrastive_zoo.testing.auditing.records import Call


class NotComparable(Exception):
    """A step, or a part of it, that cannot be repeated in one process; the message is the reason."""


class Merge:
    """Merge the calls that all ranks made of one module.

    Args:
        calls: by rank.
        recorded: the outputs of the encoders before these calls, as recorded.
        repeated: the same outputs in one process; None if there are none yet.

    Attributes:
        unlinked: shapes of trained arguments that are no rows of the outputs.
        is_gathered: whether a rank received rows of another rank.

    Raises:
        NotComparable: the ranks' arguments have different structures.
    """

    def __init__(self, calls: Sequence[Call], recorded: Outputs, repeated: Outputs) -> None:
        self.calls, self.recorded, self.repeated = calls, recorded, repeated
        self.unlinked: list[tuple[int, ...]] = []
        arguments = [call.arguments for call in calls]
        if len({(len(x.leaves), tuple(x.trained)) for x in arguments}) > 1:
            raise NotComparable("ranks call the same module with different arguments")
        self.leaves = list(zip(*(x.leaves for x in arguments), strict=True))
        self.sources: list[list[Source] | None] = []
        for i, x in enumerate(self.leaves):
            self.sources.append(self._source(i, x))
        result = [ranks for ranks in self.sources if ranks is not None]
        self.is_gathered = any(not x.is_local for ranks in result for x in ranks)
        self.sizes = self._sizes()

    def _source(self, index: int, leaf: tuple[Any, ...]) -> list[Source] | None:
        if not all(isinstance(x, Tensor) and x.is_floating_point() and x.ndim for x in leaf):
            return None
        used = {x.leaf for ranks in self.sources if ranks is not None for x in ranks}
        result = [self.recorded.find(x, rank, used) for rank, x in enumerate(leaf)]
        sources = [x for x in result if x is not None]
        if not self.calls[0].arguments.trained[index]:  # a stopped gradient, unless the gather has lost it
            return sources if len(sources) == len(leaf) and any(not x.is_local for x in sources) else None
        if len(sources) < len(leaf):
            self.unlinked.append(tuple(leaf[0].shape))
            return None
        filled = next((x for x, y in zip(sources, leaf, strict=True) if len(y)), sources[0])
        return [replace(x, transform=filled.transform) for x in sources]

    def _sizes(self) -> list[int]:
        """Return each rank's number of samples: that of its first tensor."""
        tensors = [leaf for leaf in self.leaves if all(isinstance(x, Tensor) and x.ndim for x in leaf)]
        return [len(x) for x in tensors[0]] if tensors else []

    def of_all_ranks(self, device: torch.device) -> tuple[Any, Any]:
        """Return ``(args, kwargs)`` of one process that holds all ranks' samples."""
        leaves = [self._merged(index, leaf, device) for index, leaf in enumerate(self.leaves)]
        return self.calls[0].arguments.rebuild(leaves)

    def of_rank(self, rank: int, device: torch.device) -> tuple[Any, Any]:
        """Return ``(args, kwargs)`` of one rank."""
        leaves = []
        for leaf, sources in zip(self.leaves, self.sources, strict=True):
            x = leaf[rank]
            leaves.append(self._select([sources[rank]], x) if sources else _to(x, device))
        return self.calls[rank].arguments.rebuild(leaves)

    def _merged(self, index: int, leaf: tuple[Any, ...], device: torch.device) -> Any:
        first, sources = leaf[0], self.sources[index]
        if sources is not None:
            return self._select(sources if all(x.is_local for x in sources) else sources[:1], first)
        if not isinstance(first, Tensor):
            return first
        if first.ndim == 0:
            return self._scalar(index, first, device)
        equal = all(x.shape == first.shape and torch.equal(x, first) for x in leaf)
        per_sample = [len(x) for x in leaf] == self.sizes
        if (equal and self.is_gathered) or (equal and not per_sample):
            return _to(first, device)
        x = _to(concatenated(leaf), device)
        return x.requires_grad_() if self.calls[0].arguments.trained[index] else x

    def _select(self, sources: Sequence[Source], like: Tensor) -> Tensor:
        table = self.repeated.table(row_width(like))
        assert table is not None
        rows = torch.cat([x.rows for x in sources])
        selected = sources[0].transform(table[0])[rows.to(table[0].device)]
        return selected.reshape(len(rows), *like.shape[1:]).to(like.dtype)

    def _scalar(self, index: int, x: Tensor, device: torch.device) -> Tensor:
        if not self.calls[0].arguments.trained[index]:
            return _to(x, device)
        if (result := self.recorded.scalar(x)) is None:
            self.unlinked.append(())
            return _to(x, device)
        output, transform = result
        return transform(self.repeated.leaves[output][0]).to(x.dtype)


def concatenated(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the ranks' samples; integer tensors [n, length] of tokens are padded with zeros to equal lengths.

    Raises:
        NotComparable: the shapes do not fit.

    Examples:
        >>> concatenated([torch.tensor([[1, 2]]), torch.tensor([[3]])])
        tensor([[1, 2],
                [3, 0]])
    """
    if all(x.ndim == 2 and not x.is_floating_point() for x in parts):
        parts = _padded(parts)
    try:
        return torch.cat(list(parts))
    except RuntimeError as error:
        raise NotComparable(f"the ranks' inputs cannot be concatenated: {error}") from error


def concatenated_outputs(outputs: Sequence[Any]) -> Any:
    """Concatenate the outputs of one encoder for each rank's samples, padded; a scalar is that of rank 0."""
    return tree_map(lambda *x: torch.cat(_padded(x)) if isinstance(x[0], Tensor) and x[0].ndim else x[0], *outputs)


def _padded(parts: Sequence[Tensor]) -> list[Tensor]:
    """Pad dimension 1 of all tensors to the same length."""
    if parts[0].ndim < 2:
        return list(parts)
    length = max(x.shape[1] for x in parts)
    return [torch.nn.functional.pad(x, (*([0, 0] * (x.ndim - 2)), 0, length - x.shape[1])) for x in parts]


def _to(x: Any, device: torch.device) -> Any:
    return x.to(device, copy=True) if isinstance(x, Tensor) else x
