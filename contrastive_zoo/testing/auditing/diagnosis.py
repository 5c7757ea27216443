"""The mistakes of a training: what its ranks did, and what its gradients are relative to one process."""

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from contrastive_zoo.testing.auditing.merging import Merge, NotComparable, Outputs
from contrastive_zoo.testing.auditing.records import Record
from contrastive_zoo.testing.auditing.replay import Repeated, StepEvidence
from contrastive_zoo.testing.auditing.samples import of_samples
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


PROBES: tuple[Probe, ...] = (
    _of_process,
    of_samples,
    _of_start,
    _of_optimizer,
    _of_factor,
    _of_gathering,
    _of_gradients,
)
"""The probes, in the order in which their findings are reported."""
