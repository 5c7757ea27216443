"""Masks of positives and negatives between this rank's embeddings and all, from ids that are global."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from contrastive_zoo.ranks.collectives import all_gather
from contrastive_zoo.ranks.row_checks import described, is_integer, labels_problem
from contrastive_zoo.ranks.session import agree_on_shards, refuse
from contrastive_zoo.ranks.world import Processes, World


class PairMasks(NamedTuple):
    """Relations of n anchors to N candidates; every pair is in exactly one of the three."""

    self: Bool[Tensor, "n N"]
    """The column is the anchor itself."""
    positive: Bool[Tensor, "n N"]
    """Another embedding with the anchor's id."""
    negative: Bool[Tensor, "n N"]
    """An embedding with another id."""


def global_sample_ids(n: int, views: int = 1, *, process_group: Processes = None) -> Int[Tensor, " rows"]:
    """Global sample ids of this rank's embeddings, view after view: the views of a sample share an id.

    Equal to ``torch.arange(n).repeat(views) + (samples on lower ranks)``.

    Args:
        n: this rank's samples; may differ between ranks.
        views: rows of each sample, stacked as ``torch.cat([view0, view1, …])``.
        process_group: the ranks.

    Returns:
        int64 [views · n].

    Raises:
        ValueError: n < 0 or views < 1.

    Examples:
        >>> global_sample_ids(3, views=2)
        tensor([0, 1, 2, 0, 1, 2])
    """
    world = World.of(process_group, "global_sample_ids")
    numbers = (described(x) for x in (n, views) if not is_integer(x))
    if (other := next(numbers, None)) is not None:
        refuse("global_sample_ids", f"n and views are integers, got {other}.", world=world)
    n, views = int(n), int(views)
    if n < 0 or views < 1 or n * views > _MOST_SAMPLES:
        rule = f"n >= 0 and views >= 1, and n · views <= {_MOST_SAMPLES}"
        refuse("global_sample_ids", f"{rule}, got n={n}, views={views}.", world=world)
    (shards,) = agree_on_shards(
        "global_sample_ids", {"samples": torch.empty(n, dtype=torch.int8)}, world=world, settings={"views": views}
    )
    return torch.arange(shards.start, shards.start + n).repeat(views)


_MOST_SAMPLES = 10**9  # of a rank in one step; their ids are 8 GB


def pair_masks(ids: Int[Tensor, " n"], *, process_group: Processes = None) -> PairMasks:
    """Self, positive and negative masks of this rank's embeddings against those of all ranks, in rank order.

    Columns have the order of :func:`contrastive_zoo.ranks.collectives.all_gather`.

    Args:
        ids: class labels, or :func:`global_sample_ids`; one integer per embedding, n may differ between ranks.
        process_group: the ranks.

    Returns:
        Three boolean masks [n, N] that together cover every pair once.

    Raises:
        ValueError: ids that are not one integer per embedding.

    Examples:
        >>> masks = pair_masks(torch.tensor([5, 7, 5]))
        >>> masks.positive.int()
        tensor([[0, 0, 1],
                [0, 0, 0],
                [1, 0, 0]], dtype=torch.int32)
    """
    world = World.of(process_group, "pair_masks")
    (shards,) = agree_on_shards("pair_masks", {"ids": ids}, world=world, problem=labels_problem("ids", ids))
    equal = ids[:, None] == all_gather(ids, shards=shards, process_group=world)
    self_pairs = torch.zeros_like(equal)
    self_pairs.diagonal(shards.start).fill_(True)
    return PairMasks(self_pairs, equal & ~self_pairs, ~equal)
