"""The mistakes of a training: its samples, what its ranks did, and its gradients relative to one process."""

import hashlib
import itertools
import math
import pickle
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset

from contrastive_zoo.testing.auditing.merging import Merge, NotComparable, Outputs
from contrastive_zoo.testing.auditing.records import Record, Step
from contrastive_zoo.testing.auditing.replay import Repeated, StepEvidence
from contrastive_zoo.testing.evidence import Comparison, Evidence, Gradients, Ratio
from contrastive_zoo.testing.mistakes import Diagnosis, diagnose

Probe = Callable[[Sequence[Record], Sequence[StepEvidence]], Iterator[tuple[str, str]]]
"""Yields the mistakes that it finds, each with what was measured."""


def mistakes(records: Sequence[Record], steps: Sequence[StepEvidence]) -> list[Diagnosis]:
    """Return the mistakes of a training, each once, from the records of all ranks and the steps that all ranks finished."""
    result = [Diagnosis(*x) for probe in PROBES for x in probe(records, steps)]
    return list({x.mistake: x for x in reversed(result)}.values())[::-1]


def _of_process(records: Sequence[Record], steps: Sequence[StepEvidence]) -> Iterator[tuple[str, str]]:
    if not any(x.initialized for x in records):
        yield "no process group", "no group was initialised"
    begun = [len(x.steps) for x in records]
    if any(count < max(begun) and not x.error for count, x in zip(begun, records, strict=True)):
        yield "different numbers of steps", f"ranks 0 … {len(records) - 1} began {', '.join(map(str, begun))} steps"


def _of_start(records: Sequence[Record], steps: Sequence[StepEvidence]) -> Iterator[tuple[str, str]]:
    """Compare the parameters of all ranks before the first step."""
    for first in steps[:1]:
        for group in ("loss", "encoder"):
            if (names := first.names(group)) and not first.is_sharded(names):
                states = [first.flat(x.state, names) for x in first.ranks]
                error = max((Ratio.between(x, states[0]).error for x in states[1:]), default=0.0)
                if error > 100 * first.eps:
                    yield "unequal parameters", f"those of the {group} differ by {error:.1%} before the first step"


def _of_optimizer(records: Sequence[Record], steps: Sequence[StepEvidence]) -> Iterator[tuple[str, str]]:
    for step in steps:
        optimized = step.ranks[0].optimized
        if not optimized:
            continue
        if missing := [x for x in step.names("loss") if x not in optimized and x in step.ranks[0].gradients]:
            yield "not optimized", f"parameters with a gradient in no optimizer: {len(missing)}, such as {missing[0]}"
        if stale := [x for x in step.ranks[0].stale if x in optimized]:
            yield "never zeroed", f"{len(stale)} gradients, such as that of {stale[0]}, are not zero when a step begins"


def _of_factor(records: Sequence[Record], steps: Sequence[StepEvidence]) -> Iterator[tuple[str, str]]:
    for step in steps:
        first, count = step.ranks[0], len(step.ranks[0].micro_batches)
        for call in first.losses:
            if call.factor and (mistake := first.explanation(call, step.world_size)):
                start = f"the backward pass starts with {first.factor(call) / count:.4g} at the loss"
                batches = f"{count} micro-batch{'es' if count > 1 else ''} on {step.world_size} ranks"
                unclear = ". Both numbers are equal, so it may also be × W: audit another number of processes"
                is_unclear = count == step.world_size and mistake == "accumulation not divided"
                yield mistake, f"{start}, {batches}{unclear if is_unclear else ''}"


def _of_gathering(records: Sequence[Record], steps: Sequence[StepEvidence]) -> Iterator[tuple[str, str]]:
    """Look for embeddings of other ranks in the arguments of a loss that gathers by itself; it may have refused them."""
    for step in steps:
        for micro in zip(*(x.micro_batches for x in step.ranks), strict=False):
            outputs = Outputs()
            try:
                for calls in zip(*(x.encoders for x in micro), strict=True):
                    outputs.add([x.output for x in calls])
                for calls in zip(*(x.losses for x in micro), strict=True):
                    if records[0].options[calls[0].module] and Merge(calls, outputs, Outputs()).is_gathered:
                        yield "gathered first", "the loss received embeddings of other ranks"
            except (NotComparable, ValueError):
                return


def _of_gradients(records: Sequence[Record], steps: Sequence[StepEvidence]) -> Iterator[tuple[str, str]]:
    """Infer a mistake from the first step whose gradients are not right, after the explained factors."""
    explained = {name for probe in (_of_gathering, _of_start) for name, _ in probe(records, steps)}
    for step in () if explained else steps:
        if step.truth is not None and any(step.ranks[0].gradients):
            evidence = TrainingEvidence(step, step.truth, records[0].options)
            x = evidence.comparison
            # every value may be that of one process, or only the ranks' mean
            if not (x.is_scaled(1.0, 1.0) and (x.has_values(1.0) or x.has_mean(1.0))):
                result = diagnose(evidence)
                yield result.mistake, result.measured
                return


class TrainingEvidence(Evidence):
    """The evidence of one step of a training, without stale gradients and divided by explained factors."""

    is_training = True
    stages = ("value", "gradient")

    def __init__(self, step: StepEvidence, truth: Repeated, options: Sequence[str | None]) -> None:
        self.step, self.truth, first = step, truth, step.ranks[0]
        called = sorted({call.module for call in first.losses})
        self.option = next((options[x] for x in called if options[x]), None)
        explained = (x for x in first.losses if x.factor and first.explanation(x, step.world_size))
        self.factor = next(map(first.factor, explained), 1.0)
        self.comparison = self._compared(truth)
        self.comparisons = [self.comparison]

    def _compared(self, truth: Repeated) -> Comparison:
        return Comparison(
            values=self.step.values,
            expected=torch.tensor(truth.values, dtype=torch.float64),
            encoder=self._gradients("encoder", truth),
            parameters=self._gradients("loss", truth),
            tolerance=max(self.step.reference("value")[1], 1e-12),
        )

    def _gradients(self, group: str, truth: Repeated) -> Gradients | None:
        step, names = self.step, self.step.names(group)
        unlinked = group == "encoder" and self.truth.unlinked
        if not names or step.is_sharded(names) or step.lacks_terms(names) or unlinked:
            return None
        ranks = [(step.flat(x.gradients, names) - step.flat(x.stale, names)) / self.factor for x in step.ranks]
        return Gradients.between(ranks, step.flat(truth.gradients, names), step.reference(group)[1])

    def confirms(self, mistake: str) -> bool:
        x = self.comparison
        if mistake == "local negatives" and not (self.option or self.truth.is_gathered or x.has_values(1.0)):
            alone = [y.values if y and y.values else [math.nan] * len(x.expected) for y in self.step.alone]
            local = torch.tensor(alone, dtype=torch.float64)
            return torch.allclose(x.values, local, x.tolerance, x.tolerance, equal_nan=True)
        if mistake == "batch statistics" and not self.step.draws and self.step.by_shard is not None:
            by_shard = self._compared(self.step.by_shard)
            return by_shard.has_values(1.0) and by_shard.is_scaled(1.0, 1.0)
        return False

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
    return Epoch(batches, complete, size, name, hasattr(sampler, "set_epoch"), _first_digest(loader.dataset))


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


def _of_samples(records: Sequence[Record], steps: Sequence[StepEvidence]) -> Iterator[tuple[str, str]]:
    """Yield the mistakes in the ranks' samples, each with what was measured."""
    digests = [[_digests(step) for step in record.steps] for record in records]
    together = [list(ranks) for ranks in zip(*digests, strict=False)]
    if len(records) > 1:
        if equal := [i for i, x in enumerate(together) if x[0] and all(y == x[0] for y in x)]:
            yield "same shard", f"all ranks have the same {len(together[equal[0]][0])} samples at step {equal[0] + 1}"
            return
        yield from _in_an_epoch(records, together)
    yield from _same_order(records, together)


def _in_an_epoch(records: Sequence[Record], together: Sequence[Sequence[list[str]]]) -> Iterator[tuple[str, str]]:
    """Compare the indices of the ranks' loaders; without these, the contents of the samples of each step."""
    loaders = [
        epochs
        for epochs in zip(*(record.samplers for record in records), strict=False)
        if epochs[0].first and len({(x.first, x.size) for x in epochs}) == 1  # over the same dataset
    ]
    for epochs in loaders:
        each = [[i for batch in epoch.batches for i in batch] for epoch in epochs]
        total, distinct, size = sum(map(len, each)), len(set().union(*each)), epochs[0].size
        if all(epoch.complete and len(set(x)) == size for epoch, x in zip(epochs, each, strict=True)):
            yield "not sharded", f"the {epochs[0].sampler} of every rank yields all {size} samples in an epoch"
        elif 0 < total - distinct < total * (1 - 1 / len(records)) / 2:
            repeated = f"{total - distinct} of {total} samples of an epoch are repeated"
            yield "repeated samples", f"{repeated} ({epochs[0].sampler}, {size} samples in the dataset)"
    if not loaders:
        for i, ranks in enumerate(together):
            if shared := sum(map(len, ranks)) - len(set().union(*ranks)):
                yield "repeated samples", f"{shared} of {sum(map(len, ranks))} samples of step {i + 1} are repeated"
                return


def _same_order(records: Sequence[Record], together: Sequence[Sequence[list[str]]]) -> Iterator[tuple[str, str]]:
    """Compare the first step of every later epoch with the first step."""
    if not any(epoch.shuffles for epoch in records[0].samplers):
        return
    previous = records[0].steps[0].epoch if records[0].steps else 0
    for i, step in enumerate(records[0].steps[: len(together)]):
        if step.epoch > previous and together[i] == together[0] and any(together[i]):
            yield "no set_epoch", f"step {i + 1} begins an epoch with the samples of step 1, in the same order"
            return
        previous = step.epoch


def _digests(step: Step) -> list[str]:
    """Return a digest of every sample of a step: of the inputs of the first encoder, or of a loss that holds its encoder."""
    digests = []
    for call in [(x.encoders or x.losses)[0] for x in step.micro_batches if x.encoders or x.losses]:
        tensors = [x for x in call.arguments.leaves if isinstance(x, Tensor) and x.ndim]
        by_sample = zip(*(x for x in tensors if len(x) == len(tensors[0])), strict=True)
        digests += [hashlib.sha256(b"".join(map(_bytes, sample))).hexdigest() for sample in by_sample]
    return digests


def _bytes(x: Tensor) -> bytes:
    """Return the bytes of a sample; of tokens, without the padding at the end."""
    if x.ndim == 1 and not x.is_floating_point():
        filled = x.nonzero()
        x = x[: int(filled[-1]) + 1] if len(filled) else x[:0]
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""


PROBES: tuple[Probe, ...] = (
    _of_process,
    _of_samples,
    _of_start,
    _of_optimizer,
    _of_factor,
    _of_gathering,
    _of_gradients,
)
"""The probes, in the order in which their findings are reported."""
