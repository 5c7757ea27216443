"""A sampler on one dataset, run as each rank of worlds of several sizes; random ones are a function of one integer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

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

Ints = NDArray[np.int64]
Parts = list[list[list[int]]]  # what each rank yields
KINDS = (GlobalBatchSampler, MPerClassBatchSampler, NoDuplicatesBatchSampler, HardNegativeBatchSampler)
KINDS += (TokenBatchSampler, OneDatasetBatchSampler)


@dataclass(frozen=True)
class SamplerTrial:
    """A sampler, a split over ranks, and what is known about the dataset; no process is started.

    An epoch has each of ``samples`` once. After ``step`` batches, modulo their number, a run is resumed on
    ``other_world_size`` ranks. Samplers by class have ``labels`` and a ``group`` (m, p); no value of ``columns``, [samples,
    columns], occurs twice in a batch. With ``lengths`` a batch has whole chunks of ``chunk_tokens``; with ``sources`` it has
    samples of one of them, and an epoch has a sample between ``times``.
    """

    make: Callable[..., BaseBatchSampler]
    samples: Sequence[int]
    world_size: int
    other_world_size: int
    epoch: int
    step: int
    rank_weights: Sequence[float] | None
    shuffled: bool = True
    labels: Ints | None = None
    group: tuple[int, int] = (0, 0)
    columns: Ints | None = None
    lengths: Ints | None = None
    chunk_tokens: int = 0
    sources: Ints | None = None
    times: tuple[int, int] = (1, 1)

    def sampler(self, rank: int, world_size: int) -> BaseBatchSampler:
        """Return the sampler of one rank; in a world of another size the split is even."""
        weights = self.rank_weights if world_size == self.world_size else None
        return self.make(rank_weights=weights, process_group=World(rank, world_size))

    def yielded(self, world_size: int, epoch: int, state: Mapping[str, Any] | None = None) -> Parts:
        """Return what each rank yields in an epoch, or from a loaded position on."""
        found = []
        for rank in range(world_size):
            sampler = self.sampler(rank, world_size)
            if state is None:
                sampler.set_epoch(epoch)
            else:
                sampler.load_state_dict(state)
            found.append(list(sampler))
        return found

    @cached_property
    def parts(self) -> Parts:
        return self.yielded(self.world_size, self.epoch)

    @cached_property
    def batches(self) -> list[list[int]]:
        """The global batches that the ranks' parts are of."""
        return merged(self.parts)

    @cached_property
    def alone(self) -> list[list[int]]:
        """The batches of one process."""
        return self.yielded(1, self.epoch)[0]

    def chunks(self, part: Sequence[int]) -> int:
        """Return the fewest chunks of at most ``chunk_tokens`` padded tokens that hold these samples."""
        assert self.lengths is not None
        number = left = 0
        for length in sorted(self.lengths[list(part)].tolist(), reverse=True):
            if left == 0:
                number, left = number + 1, self.chunk_tokens // length
            left -= 1
        return number


def merged(parts: Parts) -> list[list[int]]:
    """Return the parts of all ranks concatenated in rank order, batch by batch."""
    return [list(chain.from_iterable(of_ranks)) for of_ranks in zip_longest(*parts, fillvalue=())]


def random_trial(seed: int, kind: type[BaseBatchSampler]) -> SamplerTrial:
    """Return a random dataset, batch size, world size and position of a kind of sampler.

    Datasets have 1 to 120 samples; labels and values are skewed, so that classes have between one and most of the samples.
    """
    rng = np.random.default_rng(seed)

    def number(low: int, high: int) -> int:
        return int(rng.integers(low, high))

    def skewed(high: int, count: int) -> Ints:
        """Return values in 0 … high − 1, the small ones more often; how much more is random as well."""
        return (high * rng.random(count) ** rng.choice([1.0, 2.0, 6.0])).astype(np.int64)

    size, world_size = number(1, 121), number(1, 9)
    settings: dict[str, Any] = {"seed": number(0, 100)}
    about: dict[str, Any] = {"samples": range(size)}
    data: tuple[Any, ...] = (size,)
    if issubclass(kind, GlobalBatchSampler):
        settings |= {"batch_size": number(1, 40), "shuffle": bool(rng.integers(4))}
        about["shuffled"] = settings["shuffle"] and size > settings["batch_size"]
    elif issubclass(kind, MPerClassBatchSampler):
        labels = skewed(max(size, 2), max(size, 2))
        settings["singletons"] = str(rng.choice(["raise", "keep", "drop"]))
        values, counts = np.unique(labels, return_counts=True)
        if settings["singletons"] == "raise" or counts.max() == 1:  # every class has two samples
            labels = np.concatenate([labels, values])
            values, counts = np.unique(labels, return_counts=True)
        used = counts > (settings["singletons"] == "drop")
        settings |= {"m": number(2, 7), "classes_per_batch": number(1, used.sum() + 1)}
        data, about = (labels,), {"labels": labels, "group": (settings["m"], settings["classes_per_batch"])}
        about["samples"] = np.flatnonzero(np.isin(labels, values[used])).tolist()
    elif issubclass(kind, NoDuplicatesBatchSampler):
        about["columns"] = skewed(size, 2 * size).reshape(size, 2)[:, : number(1, 3)]
        settings["batch_size"], data = number(1, 40), tuple(about["columns"].T)
    elif issubclass(kind, TokenBatchSampler):
        about["lengths"] = 1 + skewed(50, size)
        settings |= {"chunk_tokens": number(about["lengths"].max(), 200), "chunks_per_batch": number(1, 9)}
        data, about["chunk_tokens"] = (about["lengths"],), settings["chunk_tokens"]
    elif issubclass(kind, OneDatasetBatchSampler):
        sizes = rng.integers(1, 30, number(1, 5)).tolist()
        lengths = [1 + skewed(50, of_part) for of_part in sizes]
        settings |= {"sizes": sizes, "temperature": float(rng.choice([1.0, 1.0, 2.0, np.inf]))}
        settings["exhausted"] = str(rng.choice(["first", "last"]))
        tokens = partial(TokenBatchSampler, chunk_tokens=60, chunks_per_batch=3, process_group=World())
        data = ([tokens(of_part, seed=index) for index, of_part in enumerate(lengths)],)
        repeated = {"first": (0, 1), "last": (1, 10**6)}[settings["exhausted"]]
        about = {"samples": range(sum(sizes)), "times": repeated if settings["temperature"] > 1 else (1, 1)}
        about |= {"sources": np.repeat(np.arange(len(sizes)), sizes)}
        about |= {"lengths": np.concatenate(lengths), "chunk_tokens": 60}
    else:
        settings["batch_size"] = number(1, 40)
        settings["group_size"] = number(1, settings["batch_size"] + 1)
        data = (rng.integers(-1, size, (size, number(0, 10))),)
    weights = rng.choice([0.0, 0.5, 0.75, 1.0, 3.0], world_size) if rng.integers(2) else np.zeros(1)
    return SamplerTrial(
        partial(kind, *data, **settings), world_size=world_size, other_world_size=number(1, 9),
        epoch=int(rng.choice([*range(5), 2**40, 2**62 - 1])), step=number(0, 1000),
        rank_weights=weights.tolist() if weights.any() else None, **about,
    )  # fmt: skip
