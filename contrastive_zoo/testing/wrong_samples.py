"""Selections of samples that a mistaken implementation compares: each returns what one rank compares."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from contrastive_zoo.testing.measurement import Call

Selection = Callable[[list[Tensor], Sequence[int], int], list[Tensor]]
"""A function of the samples of all ranks (one tensor per view, or samples and labels), the shard sizes and a rank."""


def local_samples(samples: list[Tensor], shards: Sequence[int], rank: int) -> list[Tensor]:
    """Return the samples of one rank."""
    return [x.split(list(shards))[rank] for x in samples]


def local_rank_first(samples: list[Tensor], shards: Sequence[int], rank: int) -> list[Tensor]:
    """Return all samples, those of one rank first."""
    order = [rank, *(other for other in range(len(shards)) if other != rank)]
    return [torch.cat([x.split(list(shards))[r] for r in order]) for x in samples]


def local_labels(samples: list[Tensor], shards: Sequence[int], rank: int) -> list[Tensor]:
    """Return all samples, with the labels of one rank repeated."""
    x, labels = samples
    return [x, labels.split(list(shards))[rank].repeat(len(shards))]


def blocks_as_views(samples: list[Tensor], shards: Sequence[int], rank: int) -> list[Tensor]:
    """Return views that are split from one tensor of the ranks' blocks: P N P N read as P P N N."""
    split = (x.split(list(shards)) for x in samples)
    blocks = torch.cat([block for of_rank in zip(*split, strict=True) for block in of_rank])
    return list(blocks.chunk(len(samples)))


def interleaved(samples: list[Tensor], shards: Sequence[int], rank: int) -> list[Tensor]:
    """Return the views with the samples of all but the first interleaved over ranks."""
    local_index = [index for n in shards for index in range(n)]
    order = torch.tensor(sorted(range(len(local_index)), key=lambda sample: local_index[sample]))
    return [samples[0], *(x[order] for x in samples[1:])]


SELECTIONS: dict[Call, dict[str, tuple[Selection, ...]]] = {
    "labels": {
        "local negatives": (local_samples,),
        "own rank first": (local_rank_first,),
        "labels not gathered": (local_labels,),
    },
    "views": {
        "local negatives": (local_samples,),
        "own rank first": (local_rank_first,),
        "views split wrongly": (blocks_as_views, interleaved),
    },
}
"""By call form: the mistakes that compare the wrong samples, and the selections that they amount to."""
