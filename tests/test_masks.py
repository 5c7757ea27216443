"""Masks across ranks are slices of the masks that one process makes of the global batch, pair by pair."""

from collections.abc import Callable, Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.engine.masks import PairMasks
from contrastive_zoo.testing.batch import splits
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import groups, local_shard, split

SHARDS = splits((1, 2, 3, 4), min_samples=0, max_per_rank=3)


def brute_force(ids: Sequence[int]) -> PairMasks:
    places = range(len(ids))
    kinds = [[0 if i == j else 1 if ids[i] == ids[j] else 2 for j in places] for i in places]
    table = torch.tensor(kinds, dtype=torch.int64).view(len(ids), len(ids))
    return PairMasks(*(table == kind for kind in range(3)))


def view_ids(sizes: Sequence[int], views: int) -> list[list[int]]:
    """By rank: the global number of the sample behind each embedding, view after view."""
    return [list(range(sum(sizes[:r]), sum(sizes[: r + 1]))) * views for r in range(len(sizes))]


def right(worlds: Worlds, make: Callable[[Tensor], PairMasks], ids: Tensor, sizes: Sequence[int]) -> bool:
    found = worlds.run(len(sizes), lambda: make(local_shard(ids, sizes)))
    expected = zip(*(split(mask, sizes) for mask in brute_force(ids.tolist())), strict=True)
    return all(
        torch.equal(x, y)
        for ours, theirs in zip(found, expected, strict=True)
        for x, y in zip(ours, theirs, strict=True)
    )


@given(sizes=SHARDS, views=st.integers(1, 4))
def test_views_of_a_sample_share_an_id_on_every_rank(sizes, views: int, worlds: Worlds) -> None:
    found = worlds.run(len(sizes), lambda n: cz.engine.global_sample_ids(n, views=views), each=[(n,) for n in sizes])
    assert [ids.tolist() for ids in found] == view_ids(sizes, views)
    assert {ids.dtype for ids in found} == {torch.int64}


@given(sizes=SHARDS, views=st.integers(2, 3))
def test_masks_of_views_are_those_of_the_global_batch(sizes, views: int, worlds: Worlds) -> None:
    rows = [views * n for n in sizes]
    ids = torch.tensor([i for of_rank in view_ids(sizes, views) for i in of_rank], dtype=torch.int64)
    assert right(
        worlds, lambda own: cz.engine.pair_masks(cz.engine.global_sample_ids(len(own) // views, views)), ids, rows
    )


@given(sizes=SHARDS, data=st.data())
def test_masks_of_labels_are_those_of_the_global_batch(sizes, data, worlds: Worlds) -> None:
    labels = data.draw(st.lists(st.integers(-2, 2), min_size=sum(sizes), max_size=sum(sizes)))
    dtype = data.draw(st.sampled_from([torch.int64, torch.int32, torch.int8]))
    assert right(worlds, cz.engine.pair_masks, torch.tensor(labels, dtype=dtype), sizes)


def test_masks_stay_within_a_group(worlds: Worlds) -> None:
    def job() -> list[list[int]]:
        with groups([1, 2], [0]) as group:
            return [
                x.int().tolist()
                for x in cz.engine.pair_masks(cz.engine.global_sample_ids(1, process_group=group), process_group=group)
            ]

    assert worlds.run(3, job) == [[[[1]], [[0]], [[0]]], [[[1, 0]], [[0, 0]], [[0, 1]]], [[[0, 1]], [[0, 0]], [[1, 0]]]]
