"""The batch of one process, from those of all ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class NotComparable(Exception):
    """A step that cannot be run in one process; the message is the reason."""


def merged(parts: Sequence[Any]) -> Any:
    """Concatenate tensors along dimension 0, padded if they are tokens; join lists of samples; merge mappings by key."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(_padded(parts)) if first.ndim else first
    if isinstance(first, Mapping):
        by_key = {key: merged([x[key] for x in parts]) for key in first}
        return by_key if type(first) is dict else type(first)(by_key)  # type: ignore[call-arg]  # as that of a dict
    if not isinstance(first, list | tuple):
        return first
    if len({len(x) for x in parts}) == 1 and first and all(map(_holds_samples, first)):
        columns = [merged(x) for x in zip(*parts, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    return type(first)(y for x in parts for y in x)


def _holds_samples(x: Any) -> bool:
    """Return whether an element of a batch holds all samples, as images and labels do, or is one of them, as a sentence."""
    if isinstance(x, Mapping):
        return any(isinstance(y, Tensor) and y.ndim for y in x.values())
    return isinstance(x, list | tuple) or (isinstance(x, Tensor) and x.ndim > 0)


def _padded(parts: Sequence[Tensor]) -> list[Tensor]:
    """Pad dimension 1 of tokens, [n, length], to the same length."""
    longest = max(token_lengths(parts), default=0)
    if not longest or all(x.shape[1] == longest for x in parts):
        return list(parts)
    return [torch.nn.functional.pad(x, (0, longest - x.shape[1])) for x in parts]


def token_lengths(parts: Sequence[Any]) -> list[int]:
    """Return each rank's length of its token sequences; nothing if these are no tokens."""
    is_tokens = all(isinstance(x, Tensor) and x.ndim == 2 and not x.is_floating_point() for x in parts)
    return [x.shape[1] for x in parts] if is_tokens else []


def tensors_of(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch, those of mappings and sequences included, in their order."""
    if isinstance(batch, Tensor):
        return [batch]
    children = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return [y for x in children for y in tensors_of(x)]


def reordered(batch: Any, order: Tensor) -> Any:
    """Return a batch with its samples in another order."""
    if isinstance(batch, Tensor):
        return batch[order] if batch.ndim and len(batch) == len(order) else batch
    if isinstance(batch, Mapping):
        by_key = {key: reordered(x, order) for key, x in batch.items()}
        return by_key if type(batch) is dict else type(batch)(by_key)  # type: ignore[call-arg]  # as that of a dict
    if not isinstance(batch, list | tuple):
        return batch
    if not all(map(_holds_samples, batch)) and len(batch) == len(order):
        return type(batch)(batch[i] for i in order.tolist())
    columns = [reordered(x, order) for x in batch]
    return type(batch)(*columns) if hasattr(batch, "_fields") else type(batch)(columns)
