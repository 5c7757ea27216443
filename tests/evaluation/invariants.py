"""Invariants of retrieval metrics on several ranks, for any function of a rank's embeddings, labels and ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from contrastive_zoo.testing.invariant import Broken
from contrastive_zoo.testing.worlds import Worlds

Measure = Callable[[Tensor, Tensor, Tensor], Mapping[str, float]]
"""Metrics by name of embeddings [n, d] that search among themselves, labels [n] and ids [n]; called on every rank."""

_DRAW = 99


def same_for_every_split(
    measure: Measure, rows: Tensor, labels: Tensor, *, splits: Sequence[Sequence[int]], worlds: Worlds
) -> None:
    """Metrics are the same bits on every rank, for every split of the rows over ranks, empty ranks included.

    When it fails, results of runs on different numbers of GPUs cannot be compared.

    Args:
        measure: the metrics under test.
        rows: embeddings of all ranks, [N, d].
        labels: their labels.
        splits: shard sizes to try; the first one is what the others are compared with.
        worlds: where they run.

    Raises:
        Broken: some rank returns another number.
    """
    ids = torch.arange(len(rows))
    found = [_on_ranks(measure, (rows, labels, ids), split, worlds) for split in splits]
    expected = found[0][0]
    for split, by_rank in zip(splits, found, strict=True):
        for rank, metrics in enumerate(by_rank):
            _compare(metrics, expected, f"rank {rank} of shards {list(split)}", f"shards {list(splits[0])}")


def invariant_to_row_order(
    measure: Measure, rows: Tensor, labels: Tensor, *, split: Sequence[int], worlds: Worlds
) -> None:
    """Metrics do not depend on the order of rows, not even where scores are equal.

    When it fails, a constant embedding scores as well as the order of the data set allows.

    Raises:
        Broken: another order gives another number.
    """
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(_DRAW))
    ids = torch.arange(len(rows))
    first = _on_ranks(measure, (rows, labels, ids), split, worlds)[0]
    second = _on_ranks(measure, (rows[order], labels[order], ids[order]), split, worlds)[0]
    _compare(second, first, "shuffled rows", "the first order")


def repeated_samples_count_once(
    measure: Measure, rows: Tensor, labels: Tensor, *, split: Sequence[int], worlds: Worlds
) -> None:
    """Rows that repeat the id of another row change nothing, as a padded sampler repeats samples on other ranks.

    When it fails, a repeated sample finds itself, and metrics grow with the number of ranks.

    Args:
        measure: the metrics under test.
        rows: embeddings of all ranks, [N, d].
        labels: their labels.
        split: shard sizes; every rank repeats the first row of all, as padding.
        worlds: where they run.

    Raises:
        Broken: repetitions change a number.
    """
    ids = torch.arange(len(rows))
    parts = torch.arange(len(rows)).split(list(split))
    padded = torch.cat([torch.cat([part, torch.zeros(1, dtype=torch.int64)]) for part in parts])
    expected = _on_ranks(measure, (rows, labels, ids), split, worlds)[0]
    more = [size + 1 for size in split]
    found = _on_ranks(measure, (rows[padded], labels[padded], ids[padded]), more, worlds)[0]
    _compare(found, expected, "repeated samples", "each sample once")


def _on_ranks(
    measure: Measure, tensors: Sequence[Tensor], split: Sequence[int], worlds: Worlds
) -> list[Mapping[str, float]]:
    parts = [x.split(list(split)) for x in tensors]
    return worlds.run(len(split), measure, each=list(zip(*parts, strict=True)))


def _compare(found: Mapping[str, float], expected: Mapping[str, float], what: str, source: str) -> None:
    for name, value in expected.items():
        if found[name] != value and not (found[name] != found[name] and value != value):
            raise Broken(f"{name} of {what} is {found[name]!r}; {source}: {value!r}")
