"""What a probe changes in the samples of all ranks: edits before ranks compute, and selections that a mistake amounts to."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor


def splitting(always: bool) -> AbstractContextManager[object]:
    """Context manager: ranks split every batch's loss if ``always``, else large ones; on every rank at once."""
    return patch("contrastive_zoo.engine.plan.SMALL_BATCH", -1) if always else nullcontext()


Samples = list[Tensor]  # the samples of all ranks: one tensor per view, or samples and labels
Selection = Callable[[Samples, list[int], int], Samples]  # of the samples of all ranks, the shard sizes and a rank
Edit = Callable[[list[Tensor]], list[Tensor]]  # a function of one input of all ranks, split by rank


def _by_rank(change: Callable[[Tensor, int], Tensor]) -> Edit:
    return lambda parts: [change(x, rank) for rank, x in enumerate(parts)]


def _only(of_samples: bool, edit: Edit) -> Edit:
    """Change the samples, or the labels."""
    return lambda parts: edit(parts) if parts[0].is_floating_point() == of_samples else parts


# What changes the samples of all ranks, by name
EDITS: Mapping[str, Edit] = {
    "": lambda parts: parts,
    "same draws": lambda parts: parts,  # all random numbers are the same on every rank, whatever their seed
    "other samples": _only(True, _by_rank(lambda x, rank: (1 + x).square() if rank else x)),
    "other samples shifted": _only(True, _by_rank(lambda x, rank: x + min(rank, 1))),
    "other labels": _only(False, lambda parts: [*parts[:1], *(parts[0][:1].expand_as(x) for x in parts[1:])]),
    "classes by rank": _only(False, _by_rank(lambda x, rank: x + 1000 * rank)),  # no class is on two ranks
    "ranks apart": _only(True, _by_rank(lambda x, rank: x + 100 * rank)),  # the nearest negatives are on the same rank
    "equal shards": lambda parts: parts[:1] * len(parts),
    "last shard reversed": lambda parts: [*parts[:-1], parts[-1].flip(0)],
    "all shards reversed": _by_rank(lambda x, rank: x.flip(0)),
    "two shards exchanged": lambda parts: [parts[0], parts[2], parts[1], *parts[3:]],
    "two samples exchanged": lambda parts: [parts[0][[1, 0, *range(2, len(parts[0]))]], *parts[1:]],
}


def local_rank_first(samples: Samples, shards: list[int], rank: int) -> Samples:
    order = [rank, *(other for other in range(len(shards)) if other != rank)]
    return [torch.cat([x.split(shards)[r] for r in order]) for x in samples]


def blocks_as_views(samples: Samples, shards: list[int], rank: int) -> Samples:
    """Return views that are split from one tensor of the ranks' blocks: P N P N read as P P N N."""
    by_rank = zip(*(x.split(shards) for x in samples), strict=True)
    blocks = torch.cat([block for of_rank in by_rank for block in of_rank])
    return list(blocks.chunk(len(samples)))


def interleaved(samples: Samples, shards: list[int], rank: int) -> Samples:
    """Return the views with the samples of all but the first interleaved over ranks."""
    local_index = torch.cat([torch.arange(n) for n in shards])
    order = local_index.argsort(stable=True)
    return [samples[0], *(x[order] for x in samples[1:])]


def of_one_size(choose: Callable[[list[int]], int], samples: Samples, shards: list[int], rank: int) -> Samples:
    """Return the samples with every shard cut, or padded with zeros, to a size that is chosen from theirs."""
    size = choose(shards)
    resized = [[F.pad(y, (0, 0) * (x.ndim - 1) + (0, size - len(y))) for y in x.split(shards)] for x in samples]
    return [torch.cat(x) for x in resized]


# The mistakes that compare the wrong samples, and the selections that they amount to
SELECTIONS: Mapping[str, tuple[Selection, ...]] = {
    "local negatives": (lambda samples, shards, rank: [x.split(shards)[rank] for x in samples],),
    "own rank first": (
        local_rank_first,
        # labels, or the other views, are in the order of ranks
        lambda samples, shards, rank: [*local_rank_first(samples[:1], shards, rank), *samples[1:]],
    ),
    "labels not gathered": (lambda x, shards, rank: [x[0], x[1].split(shards)[rank].repeat(len(shards))],),
    "one size": (partial(of_one_size, min), partial(of_one_size, max)),
    "views split wrongly": (blocks_as_views, interleaved),
}
