"""A collate function that accepts a batch without samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import default_collate

from contrastive_zoo.ranks.row_checks import described


class CollateEmptyBatches:
    """``collate_fn`` for ranks that may have no samples in a batch: an empty batch has the structure of the others.

    torch's and Hugging Face's collate functions need a sample. This one remembers the batch of one example; a batch without
    samples is the same structure with tensors of length 0, of the same dtype and the same further dimensions, and with
    empty lists of words and numbers.

    Args:
        example: any one sample, such as ``dataset[0]``.
        collate_fn: collates samples; its results have the batch dimension first.

    Raises:
        ValueError: a ``collate_fn`` that cannot be called.

    Examples:
        >>> import torch
        >>> collate = CollateEmptyBatches({"image": torch.ones(2, 3), "label": 5, "name": "x"})
        >>> collate([])
        {'image': tensor([], size=(0, 2, 3)), 'label': tensor([], dtype=torch.int64), 'name': []}
    """

    def __init__(self, example: Any, collate_fn: Callable[[list[Any]], Any] = default_collate) -> None:
        if not callable(collate_fn):
            raise ValueError(f"CollateEmptyBatches: collate_fn is a function of samples, got {described(collate_fn)}.")
        self.collate_fn = collate_fn
        self.empty = _emptied(collate_fn([example]))

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch of these samples."""
        return self.collate_fn(samples) if len(samples) else _emptied(self.empty)


def _emptied(batch: Any) -> Any:
    """Return a copy of a batch without samples."""
    if isinstance(batch, (Tensor, np.ndarray)):
        return batch[:0]
    if isinstance(batch, Mapping):
        return type(batch)({name: _emptied(value) for name, value in batch.items()})  # type: ignore[call-arg]  # as dicts
    if isinstance(batch, (list, tuple)):
        if not any(isinstance(x, (Tensor, np.ndarray, Mapping, list, tuple)) for x in batch):
            return type(batch)()  # one word or number per sample
        parts = [_emptied(x) for x in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
