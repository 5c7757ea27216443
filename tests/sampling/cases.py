"""Random cases for the invariants of samplers, each a function of one integer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from contrastive_zoo.data import (
    BaseBatchSampler,
    GlobalBatchSampler,
    HardNegativeBatchSampler,
    MPerClassBatchSampler,
    NoDuplicatesBatchSampler,
    OneDatasetBatchSampler,
    TokenBatchSampler,
)
from contrastive_zoo.ranks.world import World
from tests.sampling.invariants import SamplerTrial


@dataclass(frozen=True)
class Maker:
    """Constructs one sampler for any world."""

    kind: type[BaseBatchSampler]
    data: tuple[Any, ...]
    settings: dict[str, Any]

    def __call__(self, world: World, rank_weights: Sequence[float] | None) -> BaseBatchSampler:
        """Return the sampler as this world sees it."""
        return self.kind(*self.data, **self.settings, rank_weights=rank_weights, process_group=world)


def random_trial(seed: int, kinds: Sequence[type[BaseBatchSampler]] = ()) -> SamplerTrial:
    """Return a random sampler, one of these or of all kinds, dataset, batch size, world size and position.

    Datasets have 1 to 120 samples; labels and values are skewed, so that classes have between one and most of the samples.
    """
    rng = np.random.default_rng(seed)
    kind = (kinds or KINDS)[int(rng.integers(len(kinds or KINDS)))]
    size, world_size = int(rng.integers(1, 121)), int(rng.integers(1, 9))
    settings: dict[str, Any] = {"seed": int(rng.integers(100))}
    about: dict[str, Any] = {"samples": range(size)}
    if issubclass(kind, GlobalBatchSampler):
        settings |= {"batch_size": int(rng.integers(1, 40)), "shuffle": bool(rng.integers(4))}
        data: tuple[Any, ...] = (size,)
        about["shuffled"] = settings["shuffle"] and size > settings["batch_size"]
    elif issubclass(kind, MPerClassBatchSampler):
        data, about = _by_class(rng, size, settings)
    elif issubclass(kind, NoDuplicatesBatchSampler):
        values = _skewed(rng, size, 2 * size).reshape(size, 2)[:, : int(rng.integers(1, 3))]
        settings["batch_size"] = int(rng.integers(1, 40))
        data, about["columns"] = tuple(values.T), values
    elif issubclass(kind, TokenBatchSampler):
        lengths = 1 + _skewed(rng, 50, size)
        settings["chunk_tokens"] = int(rng.integers(lengths.max(), 200))
        settings["chunks_per_batch"] = int(rng.integers(1, 9))
        data, about["lengths"], about["chunk_tokens"] = (lengths,), lengths, settings["chunk_tokens"]
    elif issubclass(kind, OneDatasetBatchSampler):
        data, about = _several(rng, settings)
    else:
        settings["batch_size"] = int(rng.integers(1, 40))
        settings["group_size"] = int(rng.integers(1, settings["batch_size"] + 1))
        data = (rng.integers(-1, size, (size, int(rng.integers(0, 10)))),)
    weights = rng.choice([0.0, 0.5, 0.75, 1.0, 3.0], world_size) if rng.integers(2) else np.zeros(1)
    return SamplerTrial(
        Maker(kind, data, settings),
        world_size=world_size,
        other_world_size=int(rng.integers(1, 9)),
        epoch=int(rng.choice([*range(5), 2**40, 2**62 - 1])),
        step=int(rng.integers(1000)),
        rank_weights=weights.tolist() if weights.any() else None,
        **about,
    )


def _by_class(rng: np.random.Generator, size: int, settings: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return labels and the facts about a sampler by class; every class has two samples where singletons are refused."""
    labels = _skewed(rng, max(size, 2), max(size, 2))
    settings["singletons"] = str(rng.choice(["raise", "keep", "drop"]))
    values, counts = np.unique(labels, return_counts=True)
    if settings["singletons"] == "raise" or counts.max() == 1:
        labels = np.concatenate([labels, values])
        values, counts = np.unique(labels, return_counts=True)
    used = counts > (settings["singletons"] == "drop")
    settings |= {"m": int(rng.integers(2, 7)), "classes_per_batch": int(rng.integers(1, used.sum() + 1))}
    samples = np.flatnonzero(np.isin(labels, values[used])).tolist()
    group = settings["m"], settings["classes_per_batch"]
    return (labels,), {"samples": samples, "labels": labels, "group": group}


def _several(rng: np.random.Generator, settings: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return samplers of one to four data sets, and the facts about a sampler that takes turns between them."""
    sizes = rng.integers(1, 30, int(rng.integers(1, 5))).tolist()
    lengths = [1 + _skewed(rng, 50, size) for size in sizes]
    settings |= {"sizes": sizes, "temperature": float(rng.choice([1.0, 1.0, 2.0, np.inf]))}
    settings["exhausted"] = str(rng.choice(["first", "last"]))
    samplers = [
        TokenBatchSampler(of, chunk_tokens=60, chunks_per_batch=3, seed=index, process_group=World())
        for index, of in enumerate(lengths)
    ]
    times = {"first": (0, 1), "last": (1, 10**6)}[settings["exhausted"]] if settings["temperature"] > 1 else (1, 1)
    about = {"samples": range(sum(sizes)), "times": times, "sources": np.repeat(np.arange(len(sizes)), sizes)}
    return (samplers,), about | {"lengths": np.concatenate(lengths), "chunk_tokens": 60}


def _skewed(rng: np.random.Generator, high: int, number: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return values in 0 … high − 1, the small ones more often; how much more is random as well."""
    return (high * rng.random(number) ** rng.choice([1.0, 2.0, 6.0])).astype(np.int64)


KINDS = (GlobalBatchSampler, MPerClassBatchSampler, NoDuplicatesBatchSampler, HardNegativeBatchSampler)
KINDS += (TokenBatchSampler, OneDatasetBatchSampler)
"""The library's samplers."""
