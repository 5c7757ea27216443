"""Random samplers keep the invariants, and each invariant catches its mistake: a common one in samplers of several ranks."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from contrastive_zoo.data.batch_sampler import BaseBatchSampler, Batches, GlobalBatchSampler, rank_bounds
from contrastive_zoo.data.column_samplers import MPerClassBatchSampler, NoDuplicatesBatchSampler, codes
from contrastive_zoo.data.dataset_sampler import OneDatasetBatchSampler
from contrastive_zoo.data.token_sampler import TokenBatchSampler
from contrastive_zoo.ranks.world import World
from contrastive_zoo.testing.invariant import Broken, Invariant
from tests.sampling.cases import KINDS, random_trial
from tests.sampling.invariants import SAMPLER_INVARIANTS, SamplerTrial

pytestmark = pytest.mark.filterwarnings("ignore:MPerClassBatchSampler")  # labels are skewed

CASES = 25
"""Cases of each sampler; ``benchmarks/samplers.py --search`` runs as many as one asks for."""


class EmptyPartsSkipped(GlobalBatchSampler):
    """A rank without samples yields no batch."""

    def __iter__(self) -> Iterator[list[int]]:
        return (part for part in super().__iter__() if part)


class StridedOverRanks(GlobalBatchSampler):
    """Rank r takes every W-th sample of the epoch from the r-th on, and cuts batches of its own, as DistributedSampler."""

    def __iter__(self) -> Iterator[list[int]]:
        world = World.of(self.process_group)
        order = np.concatenate(self.global_batches(self.epoch))[world.rank :: world.size]
        size = -(-self.batch_size // world.size)
        batches = [order[size * step : size * (step + 1)].tolist() for step in range(len(self))]
        return iter(batches[self.step :])


class Padded(GlobalBatchSampler):
    """The first samples of the last batch are repeated until all ranks have equally many."""

    def __iter__(self) -> Iterator[list[int]]:
        world = World.of(self.process_group)
        for batch in self.global_batches(self.epoch)[self.step :]:
            size = -(-len(batch) // world.size)
            yield np.resize(batch, size * world.size)[size * world.rank : size * (world.rank + 1)].tolist()


class EqualShares(GlobalBatchSampler):
    """The weights of the ranks are ignored."""

    def __iter__(self) -> Iterator[list[int]]:
        world = World.of(self.process_group)
        for batch in self.global_batches(self.epoch)[self.step :]:
            yield np.array_split(batch, world.size)[world.rank].tolist()


class RestartsTheEpoch(GlobalBatchSampler):
    """The position is the epoch: a resumed run begins it again."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.set_epoch(state["epoch"])


class EpochNotInTheSeed(GlobalBatchSampler):
    """Every epoch has the order of the first."""

    def global_batches(self, epoch: int) -> Batches:
        return super().global_batches(0)


class RemainderAlone(MPerClassBatchSampler):
    """Classes are cut into groups of m and what remains, be it one sample."""

    def global_batches(self, epoch: int) -> Batches:
        seen: dict[int, int] = {}
        batches: list[list[int]] = []
        for sample, label in enumerate(self._classes.tolist()):
            seen[label] = seen.get(label, -1) + 1
            number = seen[label] // self.m
            batches.extend([] for _ in range(number + 1 - len(batches)))
            batches[number].append(sample)
        return [np.array(batch) for batch in batches]


class GroupsInRandomOrder(MPerClassBatchSampler):
    """Groups of m are shuffled and cut into batches: a batch may have two groups of one class, another one fewer classes."""

    def global_batches(self, epoch: int) -> Batches:
        order = np.argsort(self._classes, kind="stable")
        groups = np.array_split(order, max(len(order) // self.m, 1))
        shuffled = [groups[index] for index in np.random.default_rng(epoch).permutation(len(groups))]
        starts = range(0, len(shuffled), self.classes_per_batch)
        return [np.concatenate(shuffled[start : start + self.classes_per_batch]) for start in starts]


class FirstColumnOnly(NoDuplicatesBatchSampler):
    """Only the values of the first column are different."""

    def __init__(self, *columns: Any, **settings: Any) -> None:
        (first,), _ = codes(columns[:1])
        super().__init__(first, **settings)


class CutBySamples(TokenBatchSampler):
    """Every rank gets as many samples, whatever their lengths."""

    def bounds(self, batch: NDArray[np.int64], weights: tuple[float, ...]) -> list[int]:
        return rank_bounds(len(batch), weights)


class RealTokensCounted(TokenBatchSampler):
    """A batch is full when its samples have so many tokens; padding is not counted."""

    def global_batches(self, epoch: int) -> Batches:
        order = np.random.default_rng(epoch).permutation(len(self.lengths))
        number = (np.cumsum(self.lengths[order]) - 1) // (self.chunk_tokens * self.chunks_per_batch)
        batches = [order[number == x] for x in np.unique(number)]
        return [x[np.argsort(-self.lengths[x], kind="stable")] for x in batches]


class TurnsOfSamples(OneDatasetBatchSampler):
    """Samples of all data sets are shuffled before they are cut into batches."""

    def global_batches(self, epoch: int) -> Batches:
        batches = super().global_batches(epoch)
        order = np.random.default_rng(epoch).permutation(np.concatenate(batches))
        return np.split(order, np.cumsum([len(x) for x in batches])[:-1])

    def bounds(self, batch: NDArray[np.int64], weights: tuple[float, ...]) -> list[int]:
        return rank_bounds(len(batch), weights)


MISTAKES: dict[str, type[BaseBatchSampler]] = {
    "empty parts skipped": EmptyPartsSkipped,
    "strided over ranks": StridedOverRanks,
    "padded": Padded,
    "equal shares": EqualShares,
    "restarts the epoch": RestartsTheEpoch,
    "epoch not in the seed": EpochNotInTheSeed,
    "remainder alone": RemainderAlone,
    "groups in random order": GroupsInRandomOrder,
    "first column only": FirstColumnOnly,
    "cut by samples": CutBySamples,
    "real tokens counted": RealTokensCounted,
    "turns of samples": TurnsOfSamples,
}
"""By the name that invariants use."""


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_random_samplers_keep_the_invariants(kind: type[BaseBatchSampler]) -> None:
    tested = [invariant(random_trial(seed, [kind])) for seed in range(CASES) for invariant in SAMPLER_INVARIANTS]
    assert sum(tested) >= 5 * CASES


@pytest.mark.parametrize("invariant", SAMPLER_INVARIANTS, ids=str)
def test_each_invariant_catches_its_mistake(invariant: Invariant[SamplerTrial]) -> None:
    def search() -> None:
        for seed in range(40):
            invariant(random_trial(seed, [MISTAKES[invariant.catches]]))

    with pytest.raises(Broken, match=r"\d"):
        search()


def test_every_mistake_is_caught() -> None:
    assert {invariant.catches for invariant in SAMPLER_INVARIANTS} == set(MISTAKES)
