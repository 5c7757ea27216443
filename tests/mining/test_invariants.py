"""Mining keeps its invariant on several ranks, which catches mistakes."""

import numpy as np
import pytest
import torch

from contrastive_zoo.data import mine_hard_negatives
from contrastive_zoo.ranks.collectives import all_gather
from contrastive_zoo.ranks.world import ONE_PROCESS, World
from contrastive_zoo.testing.invariant import Broken
from tests.helpers import numbers

ROWS = {"queries": numbers(20, 4, seed=0), "corpus": numbers(40, 4, seed=1), "positives": torch.arange(20)}
SETTINGS = {"num_negatives": 2, "range_max": 8, "sampling": "random"}


def columns(mine, worlds, rows=ROWS, settings=SETTINGS, shards=((9, 11), (17, 23))):
    """Return the columns of all ranks in rank order, given the split of the queries and of the corpus."""

    def on_rank(rows):
        return mine(**rows, **settings)

    parts = {name: x.split(list(shards[name.startswith("corpus")])) for name, x in rows.items()}
    each = [({name: x[rank].clone() for name, x in parts.items()},) for rank in range(len(shards[0]))]
    found = worlds.run(len(each), on_rank, each=each)
    return {name: np.concatenate([of_rank[name] for of_rank in found]) for name in found[0]}


def same_columns_for_every_split(mine, worlds, rows=ROWS, settings=SETTINGS, shards=((9, 11), (17, 23))):
    """The columns of all ranks are the same bits as on one process; random choices too."""
    expected = columns(mine, worlds, rows, settings, [[sum(x)] for x in shards])
    for name, column in columns(mine, worlds, rows, settings, shards).items():
        same_kind = (column.shape, column.dtype) == (expected[name].shape, expected[name].dtype)
        if not same_kind or column.tobytes() != expected[name].tobytes():
            raise Broken(f"column {name} differs from one process")


def own_corpus(queries, corpus, positives, **settings):
    """Each rank searches in its own part of the corpus; positives elsewhere are forgotten."""
    world = World.of()
    queries_start, corpus_start = world.shards(len(queries)).start, world.shards(len(corpus)).start
    local = positives - corpus_start
    local[(local < 0) | (local >= len(corpus))] = -1
    found = mine_hard_negatives(queries, corpus, local, **settings, process_group=ONE_PROCESS)
    offsets = {"query": queries_start, "positive": corpus_start, "negative": corpus_start}
    return {name: column + offsets.get(name, 0) for name, column in found.items()}


def positions_in_the_shard(queries, corpus, positives, **settings):
    """Positives are taken for positions in the part of rank 0."""
    return mine_hard_negatives(queries, corpus, positives % World.of().shards(len(corpus)).sizes[0], **settings)


def drawn_by_local_index(queries, corpus, positives, **settings):
    """Each rank gathers the corpus and mines on its own, so that queries count from 0 on every rank."""
    found = mine_hard_negatives(queries, all_gather(corpus), positives, **settings, process_group=ONE_PROCESS)
    return {**found, "query": found["query"] + World.of().shards(len(queries)).start}


def test_the_invariant_catches_mistakes(worlds):
    same_columns_for_every_split(mine_hard_negatives, worlds)
    for mistake in (own_corpus, drawn_by_local_index, positions_in_the_shard):
        with pytest.raises(Broken):
            same_columns_for_every_split(mistake, worlds)
