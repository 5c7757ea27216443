"""Changes to a global batch that show what a loss compares: each leaves some mistake without effect."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Edit = Literal["", "other labels", "other samples", "equal shards", "last shard reversed", "all shards reversed"]
"""Nothing; other labels, or other samples, on all ranks but the first; the samples of the first rank on every rank; another
order of the samples of the last rank, or of every rank."""


def edited(samples: Sequence[Tensor], shards: Sequence[int], edit: Edit) -> list[Tensor]:
    """Return the samples of all ranks (one tensor per view, or samples and labels) after an edit.

    Examples:
        >>> edited([torch.tensor([1, 2, 3, 4])], (2, 2), "last shard reversed")
        [tensor([1, 2, 4, 3])]
    """
    return [_edited(x, list(shards), edit) for x in samples]


def _edited(x: Tensor, shards: list[int], edit: Edit) -> Tensor:
    first, *others = x.split(shards)
    if edit == "equal shards":
        return torch.cat([first] * len(shards))
    if edit in ("other labels", "other samples"):
        changes = x.is_floating_point() == (edit == "other samples")
        return torch.cat([first, *(1 + shard for shard in others)]) if changes else x
    if edit == "last shard reversed":
        return torch.cat([first, *others[:-1], *(shard.flip(0) for shard in others[-1:])])
    if edit == "all shards reversed":
        return torch.cat([first.flip(0), *(shard.flip(0) for shard in others)])
    return x
