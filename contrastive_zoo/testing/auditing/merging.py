"""The batch of one process, from those of all ranks."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class NotComparable(Exception):
    """A step that cannot be run in one process; the message is the reason."""


def merged(parts: Sequence[Any], lengths: Mapping[tuple[int, ...], int]) -> Any:
    """Concatenate tensors along dimension 0, tokens padded to these lengths; join lists; merge mappings by key."""
    first = parts[0]
    if isinstance(first, Tensor):
        length = lengths.get(tuple(map(token_length, parts)))
        padded = parts if length is None else [torch.nn.functional.pad(x, (0, length - x.shape[1])) for x in parts]
        return torch.cat(list(padded)) if first.ndim else first
    if isinstance(first, Mapping):
        return _like(first, [merged([x[key] for x in parts], lengths) for key in first])
    if not isinstance(first, list | tuple):
        return first
    if len({len(x) for x in parts}) == 1 and first and all(map(_holds_samples, first)):
        return _like(first, [merged(x, lengths) for x in zip(*parts, strict=True)])
    return type(first)(y for x in parts for y in x)


def _like(batch: Any, children: Sequence[Any]) -> Any:
    """Return a mapping or a sequence as another one, with other elements in its order."""
    if isinstance(batch, Mapping):
        by_key = dict(zip(batch, children, strict=True))
        return by_key if type(batch) is dict else type(batch)(by_key)  # type: ignore[call-arg]  # as that of a dict
    return type(batch)(*children) if hasattr(batch, "_fields") else type(batch)(children)


def _holds_samples(x: Any) -> bool:
    """Return whether an element of a batch holds all samples, as images and labels do, or is one of them, as a sentence."""
    if isinstance(x, Mapping):
        return any(isinstance(y, Tensor) and y.ndim for y in x.values())
    return isinstance(x, list | tuple) or (isinstance(x, Tensor) and x.ndim > 0)


def padded_lengths(ranks: Sequence[Sequence[Any]]) -> dict[tuple[int, ...], int]:
    """Return the length to which token sequences are padded, by their length on each rank.

    Sequences whose lengths differ get a length of their own, by which random numbers tell what is padding.
    """
    result: dict[tuple[int, ...], int] = {}
    for lengths in sorted({tuple(map(token_length, x)) for x in zip(*ranks, strict=False)}, key=lambda x: len({*x})):
        length = max(lengths, default=0)
        while length in result.values():
            length += 1
        result |= {lengths: length} if length else {}
    return result


def token_length(x: Any) -> int:
    """Return the length of the sequences in a tensor of tokens, [n, length]; 0 for anything else."""
    is_tokens = isinstance(x, Tensor) and x.ndim == 2 and not x.is_floating_point()
    return int(x.shape[1]) if is_tokens else 0


def tensors_of(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch, those of mappings and sequences included, in their order."""
    if isinstance(batch, Tensor):
        return [batch]
    return [y for x in _children(batch) for y in tensors_of(x)]


def _children(batch: Any) -> Collection[Any]:
    return batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()


def reordered(batch: Any, order: Tensor) -> Any:
    """Return a batch with its samples in another order."""
    if isinstance(batch, Tensor):
        return batch[order] if batch.ndim and len(batch) == len(order) else batch
    if not isinstance(batch, Mapping | list | tuple):
        return batch
    if isinstance(batch, list | tuple) and not all(map(_holds_samples, batch)) and len(batch) == len(order):
        return type(batch)(batch[i] for i in order.tolist())
    return _like(batch, [reordered(x, order) for x in _children(batch)])


def snapshot(x: Any, device: torch.device | str = "cpu") -> Any:
    """Return a detached copy on a device of every tensor in a tree; other values as they are."""
    if isinstance(x, Mapping) and not isinstance(x, dict):  # as a BatchEncoding, which is no tree for torch
        return _like(x, [snapshot(y, device) for y in x.values()])
    if type(x) is dict:
        return {key: snapshot(y, device) for key, y in x.items()}
    return tree_map(lambda y: y.detach().to(device, copy=True) if isinstance(y, Tensor) else y, x)
