"""Name what is wrong: factors, samples, differences between ranks, and gradients relative to one process."""

import hashlib
import itertools
import math
import pickle
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset

from contrastive_zoo.testing.auditing.evidence import StepEvidence, flat
from contrastive_zoo.testing.auditing.records import Record, Step
from contrastive_zoo.testing.auditing.rerun import Setting
from contrastive_zoo.testing.evidence import Comparison, Evidence, Gradients
from contrastive_zoo.testing.mistakes import NOT_RECOGNISED, Diagnosis, diagnose

Probe = Callable[[Sequence[Record], Sequence[StepEvidence]], Iterator[Diagnosis]]
"""Yields the mistakes that it finds."""

FACTOR_TOLERANCE = 1e-3
"""Relative difference below which a factor equals an expected one; factors of a reduced precision are powers of two."""


def mistakes(records: Sequence[Record], steps: Sequence[StepEvidence]) -> list[Diagnosis]:
    """Return the mistakes of a training, each once, from the records of all ranks and the steps that were compared."""
    result = [x for probe in PROBES for x in probe(records, steps)]
    return list({x.mistake: x for x in reversed(result)}.values())[::-1]


def _of_process(records: Sequence[Record], steps: Sequence[StepEvidence]) -> Iterator[Diagnosis]:
    if not any(x.initialized or x.error for x in records):
        yield Diagnosis("no process group", "no group was initialised")
    begun = [len(x.steps) for x in records]
    if any(count < max(begun) and not x.error for count, x in zip(begun, records, strict=True)):
        yield Diagnosis(
            "different numbers of steps", f"ranks 0 … {len(records) - 1} began {', '.join(map(str, begun))} steps"
        )


def _of_start(records: Sequence[Record], steps: Sequence[StepEvidence]) -> Iterator[Diagnosis]:
    """Compare the trained parameters of all ranks before the first step."""
    for first in steps[:1]:
        for group in ("loss", "encoder"):
            names = [x for x in first.names(group) if all(x in y.start for y in records)]
            starts = [flat(x.start, names) for x in records]
            error = first.worst(starts, starts[0]).error
            if error > 100 * first.eps:
                yield Diagnosis(
                    "unequal parameters", f"those of the {group} differ by {error:.1%} before the first step"
                )


def _of_optimizer(records: Sequence[Record], steps: Sequence[StepEvidence]) -> Iterator[Diagnosis]:
    for step in steps:
        first = step.ranks[0]
        if not first.optimized:
            continue
        if missing := [x for x in step.names("loss") if x not in first.optimized and x in first.gradients]:
            yield Diagnosis(
                "not optimized", f"parameters with a gradient in no optimizer: {len(missing)}, such as {missing[0]}"
            )
        if stale := [x for x in first.stale if x in first.optimized]:
            yield Diagnosis(
                "never zeroed", f"{len(stale)} gradients, such as that of {stale[0]}, are not zero when a step begins"
            )


def _of_factor(records: Sequence[Record], steps: Sequence[StepEvidence]) -> Iterator[Diagnosis]:
    """Compare the factor of the loss with that of one process, and that of one process with one over the micro-batches."""
    for step in steps:
        count, scale = step.ranks[0].micro_batches, _scale(step)
        alone = step.one.factor if step.one is not None else None
        # of a mean over micro-batches it is 1, whatever W is
        accumulated = "" if alone is None or count == 1 else _named(alone, {count: "not", 1 / count: "twice"})
        by_world = _named(scale, {step.world_size: "times W", 1 / step.world_size: "divided by W", 1.0: ""})
        names = [by_world, f"accumulation {accumulated} divided" if accumulated == "not" else ""]
        if name := ", ".join(filter(None, names)):
            batches = f"{count} micro-batch{'es' if count > 1 else ''} on {step.world_size} ranks"
            start = step.ranks[0].factor
            relative = f", {scale:.4g} times what it is in one process" if by_world else ""
            yield Diagnosis(
                name, f"the backward pass starts with {(start or scale) / count:.4g} at the loss{relative}, {batches}"
            )
        if alone is not None and accumulated == "twice":
            yield Diagnosis(
                "accumulation divided twice", f"a loss has the factor {alone / count:.4g}, of {count} micro-batches"
            )


def _scale(step: StepEvidence) -> float:
    """Return how much larger the factor of the loss is than in one process."""
    ranks, one = step.ranks[0].factor, step.one.factor if step.one is not None else None
    return ranks / one if ranks and one else 1.0


def _named(factor: float, names: Mapping[float, str]) -> str:
    return next((name for x, name in names.items() if math.isclose(factor, x, rel_tol=FACTOR_TOLERANCE)), "")


def _of_gathering(records: Sequence[Record], steps: Sequence[StepEvidence]) -> Iterator[Diagnosis]:
    """Look for a loss that gathers by itself and receives as many samples on each rank as in one process."""
    for step in steps:
        if _is_gathered(step):
            yield Diagnosis("gathered first", "each rank gives the loss as many samples as there are on all ranks")


def _is_gathered(step: StepEvidence) -> bool:
    one = step.reruns(Setting()).steps
    if step.index >= len(one) or step.world_size == 1:
        return False
    for calls in zip(one[step.index].losses, *(x.losses for x in step.ranks), strict=False):
        if step.records[0].options[calls[1].module] and calls[0].samples > 1:
            inputs = [len(x.samples) / x.micro_batches for x in step.ranks]
            return all(x.samples == calls[0].samples > n for x, n in zip(calls[1:], inputs, strict=True))
    return False


def _of_graph(records: Sequence[Record], steps: Sequence[StepEvidence]) -> Iterator[Diagnosis]:
    """Look for a step in which no parameter of the encoder gets a gradient, though the loss is not zero."""
    for step in steps:
        names = [x for x in step.names("encoder") if x in step.ranks[0].optimized]
        has_value = all(x and math.isfinite(x) for rank in step.ranks for x in rank.values)
        if names and has_value and not any(bool(flat(x.gradients, names).any()) for x in step.ranks):
            yield Diagnosis("detached", f"the gradients of all {len(names)} parameters of the encoder are zero")
            return


def _of_group(records: Sequence[Record], steps: Sequence[StepEvidence]) -> Iterator[Diagnosis]:
    """Look for ranks that share their samples, as those of a tensor-parallel group do, in the group of a loss."""
    for step in steps if records[0].shares_samples else ():
        for option, group in zip(records[0].options, records[0].loss_groups, strict=True):
            samples = [step.ranks[rank].samples for rank in group]
            if option and any(x == y for x, y in itertools.combinations(samples, 2)):
                yield Diagnosis(
                    "group of the loss",
                    f"ranks {list(group)} form the group of the loss, some of which have equal samples",
                )
                return


def _of_clipping(records: Sequence[Record], steps: Sequence[StepEvidence]) -> Iterator[Diagnosis]:
    """Compare the gradients before clipping, and those after it."""
    for step in steps:
        if step.one is None or step.problem or step.follows_difference or not all(x.clips for x in step.ranks):
            continue
        names = sorted(step.one.received)
        before, after = step.gradient(names), lambda x, names=names: flat(x.received, names)
        errors = [step.worst(map(vector, step.ranks), vector(step.one)).error for vector in (before, after)]
        if errors[0] <= step.tolerance(before) and errors[1] > step.tolerance(after):
            yield Diagnosis("clipped per rank", f"gradients are right before clipping and {errors[1]:.1%} off after it")
            return


def _of_state(records: Sequence[Record], steps: Sequence[StepEvidence]) -> Iterator[Diagnosis]:
    """Compare parameters outside of all optimizers after each step, such as those of a teacher."""
    for step in steps:
        names = [x for x in step.other_parameters if all(x in y.after for y in step.ranks)]
        after = [flat(x.after, names) for x in step.ranks]
        error = step.worst(after, after[0]).error
        if error > 100 * step.eps:
            start = flat(records[0].start, names)
            moved = [rank for rank, x in enumerate(after) if not torch.equal(x, start)]
            which = f"; only ranks {moved} changed them" if len(moved) < len(after) else ""
            yield Diagnosis(
                "unequal state", f"{len(names)} parameters, such as {names[0]}, differ by {error:.1e}{which}"
            )
            return


def _of_gradients(records: Sequence[Record], steps: Sequence[StepEvidence]) -> Iterator[Diagnosis]:
    """Infer a mistake from the first step whose gradients are not right, after the explained factors."""
    explained = {
        x.mistake
        for probe in (_of_process, _of_gathering, _of_graph, _of_group, _of_clipping, _of_start, _of_state)
        for x in probe(records, steps)
    }
    for step in () if explained else steps:
        is_comparable = step.one is not None and not step.problem and not step.follows_difference
        if is_comparable and step.ranks[0].gradients and not _is_right(step):
            assert step.one is not None
            evidence = TrainingEvidence(step, step.one)
            x = evidence.comparison
            # every value may be that of one process, or only the ranks' mean
            if not (x.is_scaled(1.0, 1.0) and (x.has_values(1.0) or x.has_mean(1.0))):
                yield _inferred(evidence, [x for x in steps if x.index == step.index - 1])
                return


def _is_right(step: StepEvidence) -> bool:
    """Return whether values and gradients are those of one process without a look at their noise."""
    vectors = [step.values, *(step.gradient(step.names(group)) for group in ("encoder", "loss"))]
    return _named(_scale(step), {1.0: "right"}) != "" and all(map(step.is_same, vectors))


def _inferred(evidence: Evidence, before: Sequence[StepEvidence]) -> Diagnosis:
    """Return the diagnosis of a step; state that differed after the step before explains what nothing else does."""
    result = diagnose(evidence)
    if result.mistake == NOT_RECOGNISED and before and (names := before[0].differing_tensors):
        what = f"{len(names)} buffers or tensors of modules, such as {names[0]}, differ between ranks after step"
        measured = f"{what} {before[0].index + 1}. {result.measured}"
        return replace(result, mistake="unequal state", measured=measured)
    return result


class TrainingEvidence(Evidence):
    """The evidence of one step of a training, without stale gradients and divided by explained factors."""

    is_training = True
    stages = ("value", "gradient")

    def __init__(self, step: StepEvidence, one: Step) -> None:
        self.step, options = step, step.records[0].options
        called = sorted({call.module for call in step.ranks[0].losses})
        self.option = next((options[x] for x in called if options[x]), None)
        self.factor = _scale(step)
        self.comparison = self._compared(one)
        self.comparisons = [self.comparison]

    def _compared(self, one: Step) -> Comparison:
        return Comparison(
            values=torch.stack([self.step.values(x) for x in self.step.ranks]),
            expected=self.step.values(one),
            encoder=self._gradients("encoder", one),
            parameters=self._gradients("loss", one),
            tolerance=max(self.step.tolerance(self.step.values), 1e-12),
        )

    def _gradients(self, group: str, one: Step) -> Gradients | None:
        names = [x for x in self.step.names(group) if x in one.gradients or x in self.step.ranks[0].gradients]
        if not names:
            return None
        of = self.step.gradient(names)
        ranks = [(of(x) - flat(x.stale, names)) / self.factor for x in self.step.ranks]
        return Gradients.between(ranks, of(one) - flat(one.stale, names), self.step.tolerance(of))

    def confirms(self, mistake: str) -> bool:
        x, step = self.comparison, self.step
        if mistake == "group of the loss" or (mistake == "local negatives" and not self.option):
            groups = step.records[0].loss_groups if mistake == "group of the loss" else [(0,)]
            return step.index == 0 and any(self._has_value_of(y) for y in groups if len(y) < step.world_size)
        if mistake == "batch statistics":
            by_shard = step.of(Setting(by_shard=True))
            result = self._compared(by_shard) if by_shard is not None else x
            return not x.is_scaled(1.0, 1.0) and result.has_values(1.0) and result.is_scaled(1.0, 1.0)
        return False

    def _has_value_of(self, ranks: Sequence[int]) -> bool:
        """Return whether rank 0 has the value of a training on the samples of some ranks only."""
        alone, x = self.step.of(Setting(ranks=tuple(ranks))), self.comparison
        return alone is not None and not x.has_values(1.0) and x.near(x.values[0], self.step.values(alone))

    def calls(self, name: str) -> bool:
        """Return whether the script gathers, which it must where the loss does not."""
        return name == "gather" and self.option is None


# --- samples: equal shards, repeated samples, an order that never changes ----------------------------------------------

SECONDS, BATCHES = 2.0, 20_000
"""Limits of the part of an epoch whose indices are listed."""


class Epoch(NamedTuple):
    """The samples of an epoch of one loader on one rank."""

    batches: list[list[int]]  # indices into the dataset
    complete: bool  # whether these are all batches of the epoch
    size: int  # of the dataset
    sampler: str
    shuffles: bool  # whether set_epoch chooses the order of the samples
    first: str  # digest of the first sample of the dataset, which is the same for ranks with the same dataset
    seed: Any = None  # of the sampler


def listed(loaders: Sequence[DataLoader[Any]]) -> list[Epoch]:
    """List an epoch of every loader over a dataset with indices; of the dataset, one sample is read."""
    with torch.random.fork_rng(devices=[]):
        return [epoch for loader in loaders if (epoch := _listed(loader)) is not None]


def _listed(loader: DataLoader[Any]) -> Epoch | None:
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        return None
    batches: list[list[int]] = []
    end = time.monotonic() + SECONDS
    source = _batches(loader)
    for indices in itertools.islice(source, BATCHES):
        if not all(isinstance(x, int) for x in indices):
            return None
        batches.append(list(indices))
        if time.monotonic() > end:
            break
    complete = next(source, None) is None
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while (inner := getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)) is not None:
        sampler = inner  # the innermost one chooses the order of samples
    size, name = len(loader.dataset), type(sampler).__name__
    shuffles, seed = hasattr(sampler, "set_epoch"), getattr(sampler, "seed", None)
    return Epoch(batches, complete, size, name, shuffles, _first_digest(loader.dataset), seed)


def _batches(loader: DataLoader[Any]) -> Iterator[Any]:
    if loader.batch_sampler is not None:
        yield from loader.batch_sampler
        return
    for result in loader.sampler:  # batch_size=None: the sampler yields batches or single samples
        yield result if isinstance(result, list) else [result]


def _first_digest(dataset: Any) -> str:
    """Return a digest of the first sample, whose augmentation draws the same random numbers on every rank."""
    states = random.getstate(), np.random.get_state()
    torch.manual_seed(0)  # the caller restores torch's state
    random.seed(0)
    np.random.seed(0)
    try:
        plain = tree_map(lambda x: x.tolist() if isinstance(x, Tensor) else x, dataset[0])
        return hashlib.sha256(pickle.dumps(plain)).hexdigest()
    except Exception:  # a dataset may raise anything, and a sample may not be picklable
        return ""
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _of_samples(records: Sequence[Record], steps: Sequence[StepEvidence]) -> Iterator[Diagnosis]:
    """Yield the mistakes in the ranks' samples, each with what was measured."""
    digests = [[step.samples for step in record.steps] for record in records]
    together = [list(ranks) for ranks in zip(*digests, strict=False)]
    if len(records) > 1 and not records[0].shares_samples:
        if equal := [i for i, x in enumerate(together) if x[0] and all(y == x[0] for y in x)]:
            yield Diagnosis(
                "same shard", f"all ranks have the same {len(together[equal[0]][0])} samples at step {equal[0] + 1}"
            )
            return
        yield from _in_an_epoch(records, together)
    yield from _same_order(records, together)


def _in_an_epoch(records: Sequence[Record], together: Sequence[Sequence[list[bytes]]]) -> Iterator[Diagnosis]:
    """Compare the indices of the ranks' loaders; without these, the contents of the samples of each step."""
    loaders = [
        epochs
        for epochs in zip(*(record.samplers for record in records), strict=False)
        if epochs[0].first and len({(x.first, x.size) for x in epochs}) == 1  # over the same dataset
    ]
    for epochs in loaders:
        each = [[i for batch in epoch.batches for i in batch] for epoch in epochs]
        total, distinct, size = sum(map(len, each)), len(set().union(*each)), epochs[0].size
        if len(seeds := {x.seed for x in epochs if isinstance(x.seed, int)}) > 1 and total > distinct:
            yield Diagnosis("sampler seeded per rank", f"the seeds of {epochs[0].sampler} are {sorted(seeds)}")
        elif all(epoch.complete and len(set(x)) == size for epoch, x in zip(epochs, each, strict=True)):
            yield Diagnosis(
                "not sharded", f"the {epochs[0].sampler} of every rank yields all {size} samples in an epoch"
            )
        elif 0 < total - distinct < total * (1 - 1 / len(records)) / 2:
            repeated = f"{total - distinct} of {total} samples of an epoch are repeated"
            yield Diagnosis("repeated samples", f"{repeated} ({epochs[0].sampler}, {size} samples in the dataset)")
    if not loaders:
        for i, ranks in enumerate(together):
            if shared := sum(map(len, ranks)) - len(set().union(*ranks)):
                yield Diagnosis(
                    "repeated samples", f"{shared} of {sum(map(len, ranks))} samples of step {i + 1} are repeated"
                )
                return


def _same_order(records: Sequence[Record], together: Sequence[Sequence[list[bytes]]]) -> Iterator[Diagnosis]:
    """Compare the first step of every later epoch with the first step."""
    if not any(epoch.shuffles for epoch in records[0].samplers):
        return
    previous = records[0].steps[0].epoch if records[0].steps else 0
    for i, step in enumerate(records[0].steps[: len(together)]):
        if step.epoch > previous and together[i] == together[0] and any(together[i]):
            yield Diagnosis(
                "no set_epoch", f"step {i + 1} begins an epoch with the samples of step 1, in the same order"
            )
            return
        previous = step.epoch


PROBES: tuple[Probe, ...] = (
    _of_process,
    _of_samples,
    _of_start,
    _of_optimizer,
    _of_factor,
    _of_gathering,
    _of_graph,
    _of_group,
    _of_clipping,
    _of_state,
    _of_gradients,
)
"""The probes, in the order in which their findings are reported."""
