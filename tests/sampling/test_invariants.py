"""Random samplers keep the invariants, and each invariant catches its mistakes: common ones in samplers of several ranks."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, pairwise, zip_longest
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from contrastive_zoo.data.batch_sampler import BaseBatchSampler, Batches, GlobalBatchSampler
from contrastive_zoo.data.column_samplers import MPerClassBatchSampler, NoDuplicatesBatchSampler, TokenBatchSampler
from contrastive_zoo.data.dataset_sampler import OneDatasetBatchSampler
from contrastive_zoo.ranks.world import World
from tests.helpers import EVERY_CASE

pytestmark = [pytest.mark.data, pytest.mark.filterwarnings("ignore:MPerClassBatchSampler")]  # labels are skewed

CASES = range(2000 if EVERY_CASE else 12)
MANY = 20  # samples whose order is hardly ever the same by chance

Ints = NDArray[np.int64]
KINDS = (GlobalBatchSampler, MPerClassBatchSampler, NoDuplicatesBatchSampler, TokenBatchSampler, OneDatasetBatchSampler)


@dataclass(frozen=True)
class SamplerTrial:
    """A sampler, a split over ranks, and what is known about the dataset; no process is started."""

    make: Callable[..., BaseBatchSampler]
    samples: Sequence[int]
    world_size: int
    other_world_size: int
    epoch: int
    step: int
    shuffled: bool = True
    values: Ints | None = None  # classes, or values of which no two samples of a batch have the same, [n, columns]
    group: tuple[int, int] = (1, 0)  # how many samples of a class, and of how many classes, are in a full batch
    lengths: Ints | None = None
    chunk_tokens: int = 0
    sources: Ints | None = None
    most: int = 1  # times that a sample may occur in an epoch

    def yielded(self, world_size: int, **position: Any) -> list[list[list[int]]]:
        """Return the parts of each batch from a position on, by default the beginning of the epoch."""
        samplers = [self.make(process_group=World(rank, world_size)) for rank in range(world_size)]
        for sampler in samplers:
            sampler.set_position({"epoch": self.epoch, "step": 0} | position)
        with torch.device("meta"):  # the user's default device
            return [list(parts) for parts in zip_longest(*samplers, fillvalue=[])]

    @cached_property
    def parts(self) -> list[list[list[int]]]:
        return self.yielded(self.world_size)

    @cached_property
    def batches(self) -> list[list[int]]:
        return merged(self.parts)

    @cached_property
    def alone(self) -> list[list[int]]:
        return merged(self.yielded(1))

    @cached_property
    def next_epoch(self) -> list[list[int]]:
        return merged(self.yielded(1, epoch=self.epoch + 1))

    @cached_property
    def counts(self) -> list[Counter[int]]:
        """Return how many samples of a batch have each value."""
        values = np.empty((0, 0)) if self.values is None else self.values
        batches = [] if self.values is None else self.batches
        return [Counter(x for i in batch for x in {*values[i].tolist()}) for batch in batches]

    def chunks(self, part: Sequence[int]) -> int:
        """Return the fewest chunks of at most ``chunk_tokens`` padded tokens that hold these samples."""
        number = left = 0
        for length in sorted(self.lengths[list(part)].tolist(), reverse=True):
            if left == 0:
                number, left = number + 1, self.chunk_tokens // length
            left -= 1
        return number


def merged(parts: list[list[list[int]]]) -> list[list[int]]:
    return [list(chain.from_iterable(of_ranks)) for of_ranks in parts]


def random_trial(seed: int, kind: type[BaseBatchSampler]) -> SamplerTrial:
    rng = np.random.default_rng(seed)

    def number(low: int, high: int) -> int:
        return int(rng.integers(low, high))

    def skewed(high: int, count: int) -> Ints:
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
        about = {"values": labels[:, None], "group": (settings["m"], settings["classes_per_batch"])}
        data = ([*torch.from_numpy(labels)],)  # a list of tensors of one number
        about["samples"] = np.flatnonzero(np.isin(labels, values[used])).tolist()
    elif issubclass(kind, NoDuplicatesBatchSampler):
        about["values"] = skewed(size, 2 * size).reshape(size, 2)[:, : number(1, 3)]
        settings["batch_size"], data = number(1, 40), tuple(about["values"].T)
        about["group"] = 1, settings["batch_size"]
    elif issubclass(kind, TokenBatchSampler):
        about["lengths"] = 1 + skewed(50, size)
        settings |= {"chunk_tokens": number(about["lengths"].max(), 200), "chunks_per_batch": number(1, 9)}
        data, about["chunk_tokens"] = (about["lengths"],), settings["chunk_tokens"]
    else:
        sizes = rng.integers(1, 30, number(1, 5)).tolist()
        lengths = [1 + skewed(50, of_part) for of_part in sizes]
        settings |= {"sizes": sizes, "temperature": float(rng.choice([1.0, 1.0, 2.0, np.inf]))}
        tokens = partial(TokenBatchSampler, chunk_tokens=60, chunks_per_batch=3, process_group=World())
        data = ([tokens(of_part, seed=index) for index, of_part in enumerate(lengths)],)
        about = {"samples": range(sum(sizes)), "most": 10**6 if settings["temperature"] > 1 else 1}
        about |= {"sources": np.repeat(np.arange(len(sizes)), sizes)}
        about |= {"lengths": np.concatenate(lengths), "chunk_tokens": 60}
    return SamplerTrial(
        partial(kind, *data, **settings), world_size=world_size, other_world_size=number(1, 9),
        epoch=int(rng.choice([*range(5), 2**40, 2**62 - 1])), step=number(0, 1000), **about,
    )  # fmt: skip


def same_global_batches(trial: SamplerTrial) -> bool:
    """The parts of all ranks, concatenated in rank order, are the batches of one process."""
    return trial.batches == trial.alone


def as_many_batches_on_every_rank(trial: SamplerTrial) -> bool:
    """Every rank yields as many batches as the sampler's length says: none leaves an epoch early."""
    samplers = [trial.make(process_group=World(rank, trial.world_size)) for rank in range(trial.world_size)]
    return all(len([*sampler]) == len(sampler) for sampler in samplers)


def each_sample_once(trial: SamplerTrial) -> bool:
    """An epoch has every sample exactly once, over all ranks, unless data sets are repeated."""
    counts = Counter(chain.from_iterable(trial.batches))
    return counts.keys() == set(trial.samples) and max(counts.values()) <= trial.most


def even_shares(trial: SamplerTrial) -> bool:
    """The ranks' numbers of samples, or of chunks, differ by one at most."""
    size = len if trial.lengths is None else trial.chunks
    return all(max(map(size, parts)) - min(map(size, parts)) <= 1 for parts in trial.parts)


def same_after_resume(trial: SamplerTrial) -> bool:
    """A run that stops after a step and continues on another number of ranks has the batches of one that did not stop."""
    step = trial.step % (len(trial.alone) + 1)
    before = trial.make(process_group=World(0, trial.world_size))
    before.set_epoch(trial.epoch)
    found = merged(trial.yielded(trial.other_world_size, **before.get_position(step=step)))
    return found == (trial.alone[step:] or trial.next_epoch)


def new_order_each_epoch(trial: SamplerTrial) -> bool:
    """The next epoch has other batches, unless the sampler does not shuffle."""
    return not trial.shuffled or len(trial.samples) < MANY or trial.next_epoch != trial.alone


def positive_in_batch(trial: SamplerTrial) -> bool:
    """Every sample of a class with at least two has a positive in its global batch."""
    by_batch = trial.counts if trial.group[0] > 1 else []
    members = sum(by_batch, Counter[int]())
    return all(count > 1 or members[x] == 1 for counts in by_batch for x, count in counts.items())


def m_of_each_class(trial: SamplerTrial) -> bool:
    """A batch has groups of p different classes; a group has m samples, but for the remainder of a class."""
    (m, p), by_batch = trial.group, trial.counts
    groups = Counter(x for counts in by_batch for x in counts)
    odd = Counter(x for counts in by_batch for x, count in counts.items() if count != m)
    fewest = max(*groups.values(), -(-groups.total() // p)) if m > 1 else len(by_batch)
    allowed = all(len(counts) <= p and max(counts.values()) <= m + 1 for counts in by_batch if m > 1)
    return allowed and max(odd.values(), default=0) <= 1 and len(by_batch) == fewest


def full_as_long_as_possible(trial: SamplerTrial) -> bool:
    """Full batches, of p classes or of so many samples, come first; no choice without repetitions has more of them."""
    if trial.values is None or trial.values.shape[1] > 1:
        return True
    size, sizes = trial.group[1], [len(counts) for counts in trial.counts]
    times = np.array([*Counter(x for counts in trial.counts for x in counts).values()])
    expected = max(n for n in range(times.sum() + 1) if np.minimum(times, n).sum() >= n * size)
    return [x == size for x in sizes] == [True] * expected + [False] * (len(sizes) - expected)


def no_value_twice(trial: SamplerTrial) -> bool:
    return trial.group[0] > 1 or all(count == 1 for counts in trial.counts for count in counts.values())


def chunks_stay_whole(trial: SamplerTrial) -> bool:
    """The ranks' parts need no more chunks than the global batch, so that no rank exceeds its share of padded tokens."""
    if trial.lengths is None:
        return True
    return all(sum(map(trial.chunks, parts)) == trial.chunks([*chain.from_iterable(parts)]) for parts in trial.parts)


def batches_fill_the_budget(trial: SamplerTrial) -> bool:
    """A batch has the chunks that were asked for, and one more sample would need another chunk."""
    sampler = trial.make(process_group=World())
    if not isinstance(sampler, TokenBatchSampler):
        return True
    most = sampler.chunks_per_batch
    fits = all(trial.chunks(batch) <= most for batch in trial.batches)
    return fits and all(max(trial.chunks([*x, y]) for y in after) > most for x, after in pairwise(trial.batches))


def one_source_in_a_batch(trial: SamplerTrial) -> bool:
    return trial.sources is None or all(len({*trial.sources[batch].tolist()}) <= 1 for batch in trial.batches)


def drop_last_leaves_out_the_remainder(trial: SamplerTrial) -> bool:
    """The last batches that are not full are left out."""
    if trial.sources is not None:  # each data set has its own
        return True
    sampler: Any = trial.make(process_group=World())
    if isinstance(sampler, TokenBatchSampler):
        full = [trial.chunks(batch) == sampler.chunks_per_batch for batch in trial.alone]
    elif isinstance(sampler, MPerClassBatchSampler):
        full = [len(counts) == sampler.classes_per_batch for counts in trial.counts]
    else:
        full = [len(batch) == sampler.batch_size for batch in trial.alone]
    end = max((i + 1 for i, is_full in enumerate(full) if is_full), default=0)
    return replace(trial, make=partial(trial.make, drop_last=True)).batches == trial.alone[:end]


def own_batches(self: Any) -> Iterator[list[int]]:
    """Rank r takes every W-th sample of the epoch from the r-th on, and cuts batches of its own, as DistributedSampler."""
    world = World.of(self.process_group)
    order = np.concatenate(self.global_batches(self.epoch))[world.rank :: world.size]
    size = -(-self.batch_size // world.size)
    return iter([order[size * step : size * (step + 1)].tolist() for step in range(self.step, len(self))])


def padded(self: Any) -> Iterator[list[int]]:
    """The first samples of the last batch are repeated until all ranks have equally many."""
    world = World.of(self.process_group)
    for batch in self.global_batches(self.epoch)[self.step :]:
        size = -(-len(batch) // world.size)
        yield np.resize(batch, size * world.size)[size * world.rank : size * (world.rank + 1)].tolist()


def remainder_alone(self: Any, epoch: int) -> Batches:
    """Classes are cut into groups of m and what remains, be it one sample."""
    seen = Counter[int]()
    batches = defaultdict[int, list[int]](list)
    for sample, label in enumerate(self._classes.tolist()):
        batches[seen[label] // self.m].append(sample)
        seen[label] += 1
    return [np.array(batch) for batch in batches.values()]


def evenly(self: Any, epoch: int) -> Batches:
    """Samples of a value are spread evenly: one that is frequent makes all batches small."""
    order = np.argsort(self._values[:, 0], kind="stable")
    number = max(-(-len(order) // self.batch_size), int(np.bincount(self._values[:, 0]).max()))
    return [order[start::number] for start in range(number)]


def groups_in_random_order(self: Any, epoch: int) -> Batches:
    """Groups of m are shuffled and cut into batches: a batch may have two groups of one class, another one fewer classes."""
    order = np.argsort(self._classes, kind="stable")
    groups = np.array_split(order, max(len(order) // self.m, 1))
    shuffled = [groups[index] for index in np.random.default_rng(epoch).permutation(len(groups))]
    starts = range(0, len(shuffled), self.classes_per_batch)
    return [np.concatenate(shuffled[start : start + self.classes_per_batch]) for start in starts]


def real_tokens_counted(self: Any, epoch: int) -> Batches:
    """A batch is full when its samples have so many tokens; padding is not counted."""
    order = np.random.default_rng(epoch).permutation(len(self.lengths))
    number = (np.cumsum(self.lengths[order]) - 1) // (self.chunk_tokens * self.chunks_per_batch)
    batches = [order[number == x] for x in np.unique(number)]
    return [x[np.argsort(-self.lengths[x], kind="stable")] for x in batches]


def turns_of_samples(self: Any, epoch: int) -> Batches:
    """Samples of all data sets are shuffled before they are cut into batches."""
    batches = OneDatasetBatchSampler.global_batches(self, epoch)
    order = np.random.default_rng(epoch).permutation(np.concatenate(batches))
    return np.split(order, np.cumsum([len(x) for x in batches])[:-1])


def remainder_to_the_last(self: Any, batch: NDArray[np.int64], world_size: int) -> list[int]:
    return [*(rank * (len(batch) // world_size) for rank in range(world_size)), len(batch)]


EVENLY_SPLIT = {"bounds": BaseBatchSampler.bounds}  # every rank gets as many samples, whatever their lengths

MISTAKES: dict[Callable[[SamplerTrial], bool], tuple[type[BaseBatchSampler], dict[str, Any]]] = {
    same_global_batches: (GlobalBatchSampler, {"__iter__": own_batches}),
    as_many_batches_on_every_rank: (
        GlobalBatchSampler,
        {"__iter__": lambda self: filter(None, GlobalBatchSampler.__iter__(self))},  # empty parts are skipped
    ),
    each_sample_once: (GlobalBatchSampler, {"__iter__": padded}),
    even_shares: (GlobalBatchSampler, {"bounds": remainder_to_the_last}),
    # the epoch begins again
    same_after_resume: (GlobalBatchSampler, {"set_position": lambda self, position: self.set_epoch(position["epoch"])}),
    new_order_each_epoch: (
        GlobalBatchSampler,
        {"global_batches": lambda self, epoch: GlobalBatchSampler.global_batches(self, 0)},  # the order of the first
    ),
    positive_in_batch: (MPerClassBatchSampler, {"global_batches": remainder_alone}),
    m_of_each_class: (MPerClassBatchSampler, {"global_batches": groups_in_random_order}),
    full_as_long_as_possible: (NoDuplicatesBatchSampler, {"global_batches": evenly}),
    no_value_twice: (
        NoDuplicatesBatchSampler,
        {"__init__": lambda self, first, *_, **of: NoDuplicatesBatchSampler.__init__(self, first, **of)},
    ),
    chunks_stay_whole: (TokenBatchSampler, EVENLY_SPLIT),
    batches_fill_the_budget: (TokenBatchSampler, {"global_batches": real_tokens_counted}),
    one_source_in_a_batch: (OneDatasetBatchSampler, {"global_batches": turns_of_samples} | EVENLY_SPLIT),
    drop_last_leaves_out_the_remainder: (GlobalBatchSampler, {"kept_batches": GlobalBatchSampler.global_batches}),
}
"""All invariants, and a sampler with the mistake that each catches: its kind, and other methods."""


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_random_samplers_keep_the_invariants(kind: type[BaseBatchSampler]) -> None:
    for seed in CASES:
        trial = random_trial(seed, kind)
        assert [(seed, x.__name__) for x in MISTAKES if not x(trial)] == []


def test_each_invariant_catches_its_mistake() -> None:
    for invariant, (kind, methods) in MISTAKES.items():
        mistaken = type(f"Mistaken{kind.__name__}", (kind,), methods)
        assert not all(invariant(random_trial(seed, mistaken)) for seed in range(40)), invariant.__name__
