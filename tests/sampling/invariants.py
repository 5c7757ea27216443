"""The invariants of batch samplers: functions that raise :class:`Broken` with what was found and what was expected.

Each names the mistake of :mod:`tests.sampling.mistakes` that it catches; the tests prove that it does.
"""

from collections import Counter
from fractions import Fraction

import numpy as np

from contrastive_zoo.testing.invariant import Broken, NotApplicable, invariant
from tests.sampling.trial import SamplerTrial


@invariant(catches="empty parts skipped")
def same_number_of_batches(trial: SamplerTrial) -> None:
    """Every rank yields as many batches as one process, and as the sampler's length says.

    When it fails, some rank leaves the epoch early, and the others wait for it in a collective.
    """
    expected = len(trial.on_one_process())
    for rank, batches in enumerate(trial.parts(trial.world_size, trial.epoch)):
        sampler = trial.sampler(rank, trial.world_size)
        sampler.set_epoch(trial.epoch)
        if not len(batches) == len(sampler) == expected:
            raise Broken(
                f"rank {rank} yields {len(batches)} batches, its length is {len(sampler)}; one process: {expected}"
            )


@invariant(catches="strided over ranks")
def same_global_batches(trial: SamplerTrial) -> None:
    """The parts of all ranks, concatenated in rank order, are the batches of one process.

    When it fails, the samples that a loss compares depend on the number of processes, and so does the training.
    """
    found = trial.global_batches(trial.world_size, trial.epoch)
    _same_batches(found, trial.on_one_process(), 0, f"W={trial.world_size}")


@invariant(catches="padded")
def each_sample_once(trial: SamplerTrial) -> None:
    """An epoch has every sample exactly once, over all ranks.

    When it fails, samples are repeated to make the ranks' numbers equal, or are dropped.
    """
    counts = Counter(x for batch in trial.global_batches(trial.world_size, trial.epoch) for x in batch)
    for sample in trial.samples:
        if counts[sample] != 1:
            raise Broken(f"sample {sample} occurs {counts[sample]} times in epoch {trial.epoch}; expected: once")
    if len(counts) != len(trial.samples):
        raise Broken(f"{len(counts)} different samples occur in epoch {trial.epoch}; expected: {len(trial.samples)}")


@invariant(catches="equal shares")
def shares_follow_weights(trial: SamplerTrial) -> None:
    """Each rank's number of samples differs by less than 1 from its share of the global batch.

    When it fails, a slow device gets more samples than its weight says, and the others wait for it.
    """
    weights = [Fraction(x) for x in trial.rank_weights or [1.0] * trial.world_size]
    parts = trial.parts(trial.world_size, trial.epoch)
    for step, of_ranks in enumerate(zip(*parts, strict=False)):
        total = sum(map(len, of_ranks))
        for rank, part in enumerate(of_ranks):
            share = total * weights[rank] / sum(weights)
            if abs(len(part) - share) >= 1:
                raise Broken(
                    f"rank {rank} has {len(part)} of {total} samples of batch {step}; its share: {float(share)}"
                )


@invariant(catches="restarts the epoch")
def same_after_resume(trial: SamplerTrial) -> None:
    """A run that stops after a step and continues on another number of ranks has the batches of one that did not stop.

    When it fails, samples are trained twice or not at all in the epoch in which a run was interrupted.
    """
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
    """The next epoch has other batches, unless the sampler does not shuffle.

    When it fails, the same samples are compared with each other in every epoch.
    """
    now, later = (trial.on_one_process(epoch) for epoch in (trial.epoch, trial.epoch + 1))
    if not trial.shuffled or len(trial.samples) < MANY:
        raise NotApplicable("this sampler does not shuffle, or so few samples may be in the same order by chance")
    if now == later:
        raise Broken(f"epochs {trial.epoch} and {trial.epoch + 1} have the same batches")


@invariant(catches="remainder alone")
def positive_in_batch(trial: SamplerTrial) -> None:
    """Every sample of a class with at least two has a positive in its global batch.

    When it fails, such samples are anchors without a positive, which add nothing to the loss. Applies to samplers by class.
    """
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
    one group that is not of size m. When it fails, batches are not balanced. Applies to samplers by class.
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
            raise Broken(
                f"batch {step} has {len(counts)} classes, up to {largest} samples of one; expected: {p} of {m}"
            )
    if odd and max(odd.values()) > 1:
        raise Broken(f"class {odd.most_common(1)[0][0]} has {max(odd.values())} groups of another size than {m}")
    most, total = max(groups.values()), sum(groups.values())
    if len(by_batch) != max(most, -(-total // p)):
        raise Broken(f"an epoch has {len(by_batch)} batches; {total} groups, at most {most} of a class, p={p}")
    if most <= total // p and any(len(counts) < p for counts in by_batch[:-1]):
        raise Broken(f"a batch before the last one has fewer than {p} classes: {[len(x) for x in by_batch]}")


@invariant(catches="first column only")
def no_value_twice(trial: SamplerTrial) -> None:
    """No two samples of a global batch share a value of any column.

    When it fails, a positive of one sample is taken for a negative of another. Applies to samplers without duplicates.
    """
    if trial.columns is None:
        raise NotApplicable("this sampler does not look at values")
    for step, batch in enumerate(trial.global_batches(trial.world_size, trial.epoch)):
        counts = Counter(value for sample in batch for value in set(trial.columns[sample].tolist()))
        if counts and max(counts.values()) > 1:
            value, count = counts.most_common(1)[0]
            raise Broken(f"batch {step} has {count} samples with the value {value}")


SAMPLER_INVARIANTS = (
    same_number_of_batches,
    same_global_batches,
    each_sample_once,
    shares_follow_weights,
    same_after_resume,
    new_order_each_epoch,
    positive_in_batch,
    m_of_each_class,
    no_value_twice,
)
"""All invariants of samplers, the most basic first."""

MANY = 20
"""Samples whose order is hardly ever the same by chance."""


def _same_batches(found: list[list[int]], expected: list[list[int]], first: int, where: str) -> None:
    if len(found) != len(expected):
        raise Broken(f"{where}: {len(found)} batches; one process: {len(expected)}")
    for step, (batch, reference) in enumerate(zip(found, expected, strict=True), first):
        if not np.array_equal(batch, reference):
            raise Broken(f"{where}: batch {step} is {batch}; one process: {reference}")
