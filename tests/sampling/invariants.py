"""Batch samplers under test, and their invariants: functions that raise :class:`Broken` with what was found.

Each names the mistake of :mod:`tests.sampling.test_invariants` that it catches; the tests prove that it does.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contrastive_zoo.data import BaseBatchSampler, TokenBatchSampler
from contrastive_zoo.ranks.world import World
from contrastive_zoo.testing.invariant import Broken, NotApplicable, invariant

MANY = 20
"""Samples whose order is hardly ever the same by chance."""


@dataclass(frozen=True)
class SamplerTrial:
    """A sampler on one dataset, run as each rank of worlds of several sizes; no process is started.

    ``make`` constructs the sampler as a world sees it. An epoch has each of ``samples`` once. After ``step`` batches, modulo
    their number, a run is resumed on ``other_world_size`` ranks. Samplers by class have ``labels`` and a ``group`` (m, p);
    no value of ``columns``, [samples, columns], occurs twice in a batch. With ``lengths`` a batch has whole chunks of
    ``chunk_tokens``; with ``sources`` it has samples of one of them, and an epoch has a sample between ``times``.
    """

    make: Callable[[World, Sequence[float] | None], BaseBatchSampler]
    samples: Sequence[int]
    world_size: int
    other_world_size: int = 1
    epoch: int = 0
    step: int = 0
    rank_weights: Sequence[float] | None = None
    shuffled: bool = True
    labels: NDArray[np.int64] | None = None
    group: tuple[int, int] | None = None
    columns: NDArray[np.int64] | None = None
    lengths: NDArray[np.int64] | None = None
    chunk_tokens: int = 0
    sources: NDArray[np.int64] | None = None
    times: tuple[int, int] = (1, 1)

    def sampler(self, rank: int, world_size: int) -> BaseBatchSampler:
        """Return the sampler of one rank; in a world of another size the split is even."""
        weights = self.rank_weights if world_size == self.world_size else None
        return self.make(World(rank, world_size), weights)

    def parts(self, world_size: int, epoch: int, state: Mapping[str, Any] | None = None) -> list[list[list[int]]]:
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

    def global_batches(self, world_size: int, epoch: int, state: Mapping[str, Any] | None = None) -> list[list[int]]:
        """Return the parts of all ranks concatenated in rank order, batch by batch."""
        parts = self.parts(world_size, epoch, state)
        return [list(chain.from_iterable(of_ranks)) for of_ranks in zip_longest(*parts, fillvalue=())]

    def chunks(self, part: Sequence[int]) -> int:
        """Return the fewest chunks of at most ``chunk_tokens`` padded tokens that hold these samples."""
        assert self.lengths is not None
        number = left = 0
        for length in sorted(self.lengths[list(part)].tolist(), reverse=True):
            if left == 0:
                number, left = number + 1, self.chunk_tokens // length
            left -= 1
        return number

    def on_one_process(self, epoch: int | None = None) -> list[list[int]]:
        """Return the batches of an epoch on one process."""
        return self.parts(1, self.epoch if epoch is None else epoch)[0]


@invariant(catches="empty parts skipped")
def same_number_of_batches(trial: SamplerTrial) -> None:
    """Every rank yields as many batches as one process, and as the sampler's length says: no rank leaves an epoch early."""
    expected = len(trial.on_one_process())
    for rank, batches in enumerate(trial.parts(trial.world_size, trial.epoch)):
        sampler = trial.sampler(rank, trial.world_size)
        sampler.set_epoch(trial.epoch)
        if not len(batches) == len(sampler) == expected:
            raise Broken(f"rank {rank} yields {len(batches)} of {len(sampler)} batches; one process: {expected}")


@invariant(catches="strided over ranks")
def same_global_batches(trial: SamplerTrial) -> None:
    """The parts of all ranks, concatenated in rank order, are the batches of one process."""
    found = trial.global_batches(trial.world_size, trial.epoch)
    _same_batches(found, trial.on_one_process(), 0, f"W={trial.world_size}")


@invariant(catches="padded")
def each_sample_once(trial: SamplerTrial) -> None:
    """An epoch has every sample exactly once, over all ranks, unless data sets are repeated or cut."""
    counts = Counter(x for batch in trial.global_batches(trial.world_size, trial.epoch) for x in batch)
    low, high = trial.times
    if counts.keys() - set(trial.samples) or not all(low <= counts[x] <= high for x in trial.samples):
        raise Broken(f"samples of epoch {trial.epoch} and how often they occur: {counts}; expected: {low} … {high}")


@invariant(catches="equal shares")
def shares_follow_weights(trial: SamplerTrial) -> None:
    """Each rank's number of samples, or of chunks, differs by less than 1 from its share of the global batch."""
    weights = [Fraction(x) for x in trial.rank_weights or [1.0] * trial.world_size]
    parts = trial.parts(trial.world_size, trial.epoch)
    for step, of_ranks in enumerate(zip(*parts, strict=False)):
        sizes = [len(part) if trial.lengths is None else trial.chunks(part) for part in of_ranks]
        for rank, size in enumerate(sizes):
            share = sum(sizes) * weights[rank] / sum(weights)
            if abs(size - share) >= 1:
                raise Broken(f"rank {rank} has {size} of {sum(sizes)} in batch {step}, not {float(share)}")


@invariant(catches="restarts the epoch")
def same_after_resume(trial: SamplerTrial) -> None:
    """A run that stops after a step and continues on another number of ranks has the batches of one that did not stop."""
    whole = trial.on_one_process()
    step = trial.step % (len(whole) + 1)
    before = trial.sampler(0, trial.world_size)
    before.set_epoch(trial.epoch)
    state = before.state_dict(step=step)
    expected = whole[step:] if step < len(whole) else trial.on_one_process(trial.epoch + 1)
    found = trial.global_batches(trial.other_world_size, trial.epoch, state)
    _same_batches(found, expected, step, f"resumed after {step} batches on W={trial.other_world_size}")


@invariant(catches="epoch not in the seed")
def new_order_each_epoch(trial: SamplerTrial) -> None:
    """The next epoch has other batches, unless the sampler does not shuffle."""
    now, later = (trial.on_one_process(epoch) for epoch in (trial.epoch, trial.epoch + 1))
    if not trial.shuffled or len(trial.samples) < MANY:
        raise NotApplicable("this sampler does not shuffle, or so few samples may be in the same order by chance")
    if now == later:
        raise Broken(f"epochs {trial.epoch} and {trial.epoch + 1} have the same batches")


@invariant(catches="remainder alone")
def positive_in_batch(trial: SamplerTrial) -> None:
    """Every sample of a class with at least two has a positive in its global batch."""
    if trial.labels is None:
        raise NotApplicable("this sampler does not look at classes")
    members = Counter(trial.labels.tolist())
    for step, batch in enumerate(trial.global_batches(trial.world_size, trial.epoch)):
        for label, count in Counter(trial.labels[batch].tolist()).items():
            if count == 1 and members[label] > 1:
                raise Broken(f"batch {step} has one sample of class {label}, which has {members[label]}")


@invariant(catches="groups in random order")
def m_of_each_class(trial: SamplerTrial) -> None:
    """A batch has groups of p different classes; a group has m samples, but for the remainder of a class.

    Only the last batch has fewer than p classes, unless one class has more groups than full batches. Each class has at most
    one group that is not of size m.
    """
    if trial.labels is None or trial.group is None:
        raise NotApplicable("this sampler does not look at classes")
    m, p = trial.group
    by_batch = [Counter(trial.labels[x].tolist()) for x in trial.global_batches(trial.world_size, trial.epoch)]
    groups = Counter(label for counts in by_batch for label in counts)
    odd = Counter(label for counts in by_batch for label, count in counts.items() if count != m)
    for step, counts in enumerate(by_batch):
        largest = max(counts.values())
        if len(counts) > p or largest > m + 1:
            raise Broken(f"batch {step} has {len(counts)} classes, up to {largest} samples; expected: {p} of {m}")
    if odd and max(odd.values()) > 1:
        raise Broken(f"class {odd.most_common(1)[0][0]} has {max(odd.values())} groups of another size than {m}")
    most, total = max(groups.values()), sum(groups.values())
    if len(by_batch) != max(most, -(-total // p)):
        raise Broken(f"an epoch has {len(by_batch)} batches; {total} groups, at most {most} of a class, p={p}")
    if most <= total // p and any(len(counts) < p for counts in by_batch[:-1]):
        raise Broken(f"a batch before the last one has fewer than {p} classes: {[len(x) for x in by_batch]}")


@invariant(catches="first column only")
def no_value_twice(trial: SamplerTrial) -> None:
    """No two samples of a global batch share a value of any column."""
    if trial.columns is None:
        raise NotApplicable("this sampler does not look at values")
    for step, batch in enumerate(trial.global_batches(trial.world_size, trial.epoch)):
        counts = Counter(value for sample in batch for value in set(trial.columns[sample].tolist()))
        if counts and max(counts.values()) > 1:
            value, count = counts.most_common(1)[0]
            raise Broken(f"batch {step} has {count} samples with the value {value}")


@invariant(catches="cut by samples")
def chunks_stay_whole(trial: SamplerTrial) -> None:
    """The ranks' parts need no more chunks than the global batch, so that no rank exceeds its share of padded tokens."""
    if trial.lengths is None:
        raise NotApplicable("this sampler does not look at lengths")
    for step, of_ranks in enumerate(zip(*trial.parts(trial.world_size, trial.epoch), strict=True)):
        found, whole = sum(map(trial.chunks, of_ranks)), trial.chunks([*chain.from_iterable(of_ranks)])
        if found != whole:
            raise Broken(f"the parts of batch {step} need {found} chunks of {trial.chunk_tokens} tokens, not {whole}")


@invariant(catches="real tokens counted")
def batches_fill_the_budget(trial: SamplerTrial) -> None:
    """A batch has the chunks that were asked for, and one more sample would need another chunk."""
    sampler = trial.sampler(0, 1)
    if not isinstance(sampler, TokenBatchSampler):
        raise NotApplicable("this sampler has no budget of its own")
    batches = trial.global_batches(trial.world_size, trial.epoch)
    for step, (batch, after) in enumerate(zip_longest(batches, batches[1:], fillvalue=[])):
        number, more = trial.chunks(batch), [trial.chunks([*batch, x]) for x in after]
        if number > sampler.chunks_per_batch or (more and max(more) <= sampler.chunks_per_batch):
            raise Broken(f"batch {step} has {number} chunks; with another sample {more}: {sampler.chunks_per_batch}")


@invariant(catches="turns of samples")
def one_source_in_a_batch(trial: SamplerTrial) -> None:
    """All samples of a global batch are of one data set."""
    if trial.sources is None:
        raise NotApplicable("this sampler does not look at data sets")
    for step, batch in enumerate(trial.global_batches(trial.world_size, trial.epoch)):
        if len(sources := set(trial.sources[batch].tolist())) > 1:
            raise Broken(f"batch {step} has samples of the data sets {sources}")


SAMPLER_INVARIANTS = (same_number_of_batches, same_global_batches, each_sample_once, shares_follow_weights)
SAMPLER_INVARIANTS += (same_after_resume, new_order_each_epoch, positive_in_batch, m_of_each_class, no_value_twice)
SAMPLER_INVARIANTS += (chunks_stay_whole, batches_fill_the_budget, one_source_in_a_batch)
"""All invariants of samplers, the most basic first."""


def _same_batches(found: list[list[int]], expected: list[list[int]], first: int, where: str) -> None:
    if len(found) != len(expected):
        raise Broken(f"{where}: {len(found)} batches; one process: {len(expected)}")
    for step, (batch, reference) in enumerate(zip(found, expected, strict=True), first):
        if not np.array_equal(batch, reference):
            raise Broken(f"{where}: batch {step} is {batch}; one process: {reference}")
