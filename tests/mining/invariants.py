"""Invariants of mined hard negatives, and common mistakes in mining on several processes that they catch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from contrastive_zoo.data.hard_negatives import mine_hard_negatives
from contrastive_zoo.ranks.collectives import all_gather
from contrastive_zoo.ranks.world import ONE_PROCESS, World
from contrastive_zoo.testing.invariant import Broken, NotApplicable, invariant
from contrastive_zoo.testing.worlds import Worlds

Columns = Mapping[str, NDArray[Any]]
Mine = Callable[..., Columns]
"""A function with the arguments of :func:`contrastive_zoo.data.mine_hard_negatives`."""


@dataclass(frozen=True)
class MiningTrial:
    """One way of mining on one dataset.

    Args:
        mine: the function under test.
        rows: tensors of all ranks, by argument; those whose name begins with ``corpus`` are split as the corpus.
        query_shards: the split of the queries.
        corpus_shards: the split of the corpus, over as many ranks.
        settings: further arguments.
        worlds: the process groups to run on.
    """

    mine: Mine
    rows: Mapping[str, Tensor]
    query_shards: Sequence[int]
    corpus_shards: Sequence[int]
    settings: Mapping[str, Any]
    worlds: Worlds

    def columns(self, *, on_one_process: bool = False) -> Columns:
        """Return the columns of all ranks in rank order."""
        shards = [list(self.query_shards), list(self.corpus_shards)]
        if on_one_process:
            shards = [[sum(x)] for x in shards]
        parts = {name: x.split(shards[name.startswith("corpus")]) for name, x in self.rows.items()}
        each = [({name: x[rank].clone() for name, x in parts.items()},) for rank in range(len(shards[0]))]
        found = self.worlds.run(len(each), _mined, self.mine, dict(self.settings), each=each)
        return {name: np.concatenate([of_rank[name] for of_rank in found]) for name in found[0]}


def _mined(mine: Mine, settings: Mapping[str, Any], rows: Mapping[str, Tensor]) -> Columns:
    return mine(**rows, **settings)


@invariant(catches="own corpus")
def same_columns_for_every_split(trial: MiningTrial) -> None:
    """The columns of all ranks, concatenated in rank order, are the same bits as on one process.

    When it fails, negatives depend on the number of processes, and a run cannot be repeated on another number.
    """
    found, expected = trial.columns(), trial.columns(on_one_process=True)
    for name, column in expected.items():
        if found[name].shape != column.shape:
            raise Broken(f"column {name} has shape {list(found[name].shape)}; one process: {list(column.shape)}")
        if found[name].tobytes() != column.tobytes():
            place = np.flatnonzero((found[name] != column).reshape(len(column), -1).any(1))
            first = f"first in row {place[0]}" if len(place) else "in bits only"
            raise Broken(f"column {name} differs from one process in {len(place)} of {len(column)} rows, {first}")


@invariant(catches="positions in the shard")
def no_positive_among_negatives(trial: MiningTrial) -> None:
    """No negative of a query is one of its positives, and every positive is the query's.

    When it fails, the loss pushes a query away from its answer.
    """
    columns = trial.columns()
    positives = trial.rows["positives"].view(len(trial.rows["queries"]), -1).tolist()
    for query, positive, negative in zip(
        *(columns[x].tolist() for x in ("query", "positive", "negative")), strict=True
    ):
        if negative in positives[query] or positive not in positives[query]:
            raise Broken(
                f"query {query} has the negative {negative} beside {positive}; its positives: {positives[query]}"
            )


@invariant(catches="drawn by local index")
def same_random_choice_for_every_split(trial: MiningTrial) -> None:
    """Random negatives are the same for every split.

    When it fails, the random numbers of a query depend on its position in the shard. Applies to random sampling.
    """
    if trial.settings.get("sampling") != "random":
        raise NotApplicable("nothing is drawn at random")
    same_columns_for_every_split.check(trial)


MINING_INVARIANTS = (same_columns_for_every_split, no_positive_among_negatives, same_random_choice_for_every_split)
"""All invariants of mining."""


def own_corpus(queries: Tensor, corpus: Tensor, positives: Tensor, **settings: Any) -> Columns:
    """Each rank searches in its own part of the corpus; positives elsewhere are forgotten."""
    world = World.of()
    queries_start, corpus_start = world.shards(len(queries)).start, world.shards(len(corpus)).start
    local = positives - corpus_start
    local[(local < 0) | (local >= len(corpus))] = -1
    found = mine_hard_negatives(queries, corpus, local, **settings, process_group=ONE_PROCESS)
    offsets = {"query": queries_start, "positive": corpus_start, "negative": corpus_start}
    return {name: column + offsets.get(name, 0) for name, column in found.items()}


def positions_in_the_shard(queries: Tensor, corpus: Tensor, positives: Tensor, **settings: Any) -> Columns:
    """Positives are taken for positions in the part of rank 0."""
    return mine_hard_negatives(queries, corpus, positives % World.of().shards(len(corpus)).sizes[0], **settings)


def drawn_by_local_index(queries: Tensor, corpus: Tensor, positives: Tensor, **settings: Any) -> Columns:
    """Each rank gathers the corpus and mines on its own, so that queries count from 0 on every rank."""
    found = mine_hard_negatives(queries, all_gather(corpus), positives, **settings, process_group=ONE_PROCESS)
    return {**found, "query": found["query"] + World.of().shards(len(queries)).start}


MISTAKES: dict[str, Mine] = {
    "own corpus": own_corpus,
    "positions in the shard": positions_in_the_shard,
    "drawn by local index": drawn_by_local_index,
}
"""By the name that invariants use."""
