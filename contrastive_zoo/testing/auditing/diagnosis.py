"""Infer the mistakes of a training from the evidence of its steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from contrastive_zoo.testing.auditing.comparison import Ratio, flat, tolerance
from contrastive_zoo.testing.auditing.evidence import StepEvidence
from contrastive_zoo.testing.auditing.factors import explanation, factor
from contrastive_zoo.testing.auditing.links import Outputs
from contrastive_zoo.testing.auditing.merging import Merge, NotComparable
from contrastive_zoo.testing.auditing.mistakes import MISTAKES, NOT_RECOGNISED
from contrastive_zoo.testing.auditing.one_process import Repeated
from contrastive_zoo.testing.auditing.records import Record
from contrastive_zoo.testing.auditing.samples import sample_mistakes


@dataclass(frozen=True)
class Finding:
    """A mistake and what was measured.

    Attributes:
        mistake: its name, a key of :data:`contrastive_zoo.testing.auditing.mistakes.MISTAKES`.
        measured: what the audit measured, in words.
    """

    mistake: str
    measured: str

    def __str__(self) -> str:
        result = MISTAKES[self.mistake]
        return f"{result.mistake}: {result.why} Measured: {self.measured}. Fix: {result.fix}"


def diagnose(records: Sequence[Record], steps: Sequence[StepEvidence]) -> list[Finding]:
    """Return the mistakes of a training; none if there are none.

    Args:
        records: of all ranks.
        steps: the evidence of the steps that all ranks finished.
    """
    result = [Finding(*x) for probe in PROBES for x in probe(records, steps)]
    return list({x.mistake: x for x in reversed(result)}.values())[::-1]


Probe = Callable[[Sequence[Record], Sequence[StepEvidence]], Iterator[tuple[str, str]]]


def _of_process(records: Sequence[Record], steps: Sequence[StepEvidence]) -> Iterator[tuple[str, str]]:
    if not any(x.initialized for x in records):
        yield "no process group", "no group was initialised"
    begun = [len(x.steps) for x in records]
    if any(count < max(begun) and not x.error for count, x in zip(begun, records, strict=True)):
        yield "different numbers of steps", f"ranks 0 … {len(records) - 1} began {', '.join(map(str, begun))} steps"


def _of_samples(records: Sequence[Record], steps: Sequence[StepEvidence]) -> Iterator[tuple[str, str]]:
    yield from sample_mistakes(records)


def _of_start(records: Sequence[Record], steps: Sequence[StepEvidence]) -> Iterator[tuple[str, str]]:
    """Compare the parameters of all ranks before the first step."""
    first = steps[0] if steps else None
    for group in ("loss", "encoder"):
        if first is None or not (names := first.names(group)) or first.is_sharded(names):
            continue
        states = [flat(x.state, names, first) for x in first.ranks]
        errors = [Ratio.between(x, states[0]).error for x in states[1:]]
        if max(errors, default=0.0) > 100 * first.eps:
            yield "unequal parameters", f"those of the {group} differ by {max(errors):.1%} before the first step"


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
        for call in step.ranks[0].losses:
            if call.factor and (mistake := explanation(call, step.ranks[0], step.world_size)):
                count = len(step.ranks[0].micro_batches)
                start = f"the backward pass starts with {factor(call, step.ranks[0]) / count:.4g} at the loss"
                batches = f"{count} micro-batch{'es' if count > 1 else ''} on {step.world_size} ranks"
                unclear = ". Both numbers are equal, so it may also be × W: audit another number of processes"
                is_unclear = count == step.world_size and mistake == "accumulation not divided"
                yield mistake, f"{start}, {batches}{unclear if is_unclear else ''}"


def _of_gathering(records: Sequence[Record], steps: Sequence[StepEvidence]) -> Iterator[tuple[str, str]]:
    """Look for rows of other ranks in the arguments of a loss that gathers by itself; it may have refused them."""
    for step in steps:
        for micro in zip(*(x.micro_batches for x in step.ranks), strict=False):
            try:
                outputs = Outputs(
                    [[x.output for x in calls] for calls in zip(*(x.encoders for x in micro), strict=True)]
                )
                for calls in zip(*(x.losses for x in micro), strict=True):
                    if records[0].options[calls[0].module] and Merge(calls, outputs, Outputs([])).is_gathered:
                        yield "gathered first", "the loss received embeddings of other ranks"
            except (NotComparable, ValueError):
                return


def _of_gradients(records: Sequence[Record], steps: Sequence[StepEvidence]) -> Iterator[tuple[str, str]]:
    """Infer a mistake from the first step whose gradients are not right, after the explained factors."""
    if any(
        x[0] in ("gathered first", "unequal parameters")
        for x in (*_of_gathering(records, steps), *_of_start(records, steps))
    ):
        return
    for step in steps:
        if step.truth is None or not any(step.ranks[0].gradients):
            continue
        gradients = Gradients(step, records[0].options)
        if not (gradients.are_right and gradients.values_are_right):
            mistake = next((name for name, fits in SIGNATURES.items() if fits(gradients)), NOT_RECOGNISED)
            yield mistake, gradients.signature()
            return


class Gradients:
    """The gradients of all ranks at one step, without stale gradients and divided by explained factors.

    Args:
        step: the evidence.
        options: ``grad_reduction`` of each loss.
    """

    def __init__(self, step: StepEvidence, options: Sequence[str | None]) -> None:
        assert step.truth is not None
        self.step, self.truth, self.world_size = step, step.truth, step.world_size
        called = {call.module for call in step.ranks[0].losses}
        self.option = next((options[x] for x in sorted(called) if options[x]), None)
        self.values = torch.tensor(step.values, dtype=torch.float64)
        self.expected = torch.tensor(step.truth.values, dtype=torch.float64)
        self.factor = next(
            (
                factor(call, step.ranks[0])
                for call in step.ranks[0].losses
                if call.factor and explanation(call, step.ranks[0], step.world_size)
            ),
            1.0,
        )

    def of(self, group: str, truth: Repeated | None = None) -> list[Ratio]:
        """Return the gradient of every rank, and last their mean, relative to the step in one process."""
        names = self.step.names(group)
        if (
            not names
            or self.step.is_sharded(names)
            or self.step.lacks_terms(names)
            or (group == "encoder" and self.truth.unlinked)
        ):
            return []
        expected = flat((truth or self.truth).gradients, names, self.step)
        result = [
            (flat(x.gradients, names, self.step) - flat(x.stale, names, self.step)) / self.factor
            for x in self.step.ranks
        ]
        return [Ratio.between(x, expected) for x in (*result, torch.stack(result).mean(0))]

    def is_scaled(self, group: str, by: float, truth: Repeated | None = None) -> bool:
        """Return whether the gradient of every rank is ``by`` times that of one process; true if there is none."""
        return all(self._near(group, x, by) for x in self.of(group, truth)[:-1])

    def mean_is_right(self, group: str) -> bool:
        """Return whether the ranks' gradients differ and their mean is right."""
        result = self.of(group)
        return bool(result) and not self.is_scaled(group, 1.0) and self._near(group, result[-1], 1.0)

    def _near(self, group: str, x: Ratio, by: float) -> bool:
        bound = tolerance(self.step, group)
        bound *= max(abs(by), 1.0)
        return abs(x.ratio - by) <= bound and x.rest <= bound

    def values_are(self, expected: torch.Tensor) -> bool:
        """Return whether the ranks' values [W, losses] equal these."""
        bound = max(tolerance(self.step, "value"), 1e-12)
        return bool(
            torch.allclose(self.values, expected.expand_as(self.values), rtol=bound, atol=bound, equal_nan=True)
        )

    @property
    def are_right(self) -> bool:
        """Whether both gradients are right."""
        return self.is_scaled("encoder", 1.0) and self.is_scaled("loss", 1.0)

    @property
    def values_are_right(self) -> bool:
        """Whether every rank has the value of one process, or the ranks' mean is that value and gradients are right."""
        mean = self.values.mean(0)
        bound = max(tolerance(self.step, "value"), 1e-12)
        return self.values_are(self.expected) or (
            self.are_right and torch.allclose(mean, self.expected, rtol=bound, atol=bound)
        )

    def signature(self) -> str:
        """Return what was measured, relative to one process."""
        parts = []
        for group in ("encoder", "loss"):
            if result := self.of(group)[:-1]:
                worst = max(result, key=lambda x: x.error)
                parts.append(
                    f"gradient of the {group} × {worst.ratio:.4g}, cosine {worst.cosine:.4f}, {worst.error:.1%} off"
                )
        values = ", ".join(f"{x:.4g}" for x in self.values[:, :1].flatten().tolist())
        parts.append(f"values {values}, one process {self.expected[:1].sum():.4g}")
        return "; ".join(parts)


def _is_local(x: Gradients) -> bool:
    """Return whether every rank's value is that of its samples alone."""
    alone = [y.values if y else [math.nan] * len(x.expected) for y in x.step.alone]
    local = torch.tensor(alone, dtype=torch.float64)
    return (
        x.option is None and not x.truth.is_gathered and bool(alone) and not x.values_are_right and x.values_are(local)
    )


def _has_batch_statistics(x: Gradients) -> bool:
    apart = x.step.by_shard
    if x.step.draws or apart is None:
        return False
    values = torch.tensor(apart.values, dtype=torch.float64)
    return x.values_are(values) and x.is_scaled("encoder", 1.0, apart) and x.is_scaled("loss", 1.0, apart)


def _lacks_parameter_reduction(x: Gradients) -> bool:
    if not x.step.names("loss") or not x.is_scaled("encoder", 1.0):
        return False
    return x.mean_is_right("loss") or (x.option == "sum" and x.is_scaled("loss", 1 / x.world_size))


SIGNATURES: dict[str, Callable[[Gradients], bool]] = {
    "batch statistics": _has_batch_statistics,
    "local negatives": _is_local,
    "detached": lambda x: bool(x.of("encoder")) and x.is_scaled("encoder", 0.0) and x.is_scaled("loss", 1.0),
    "not reduced": lambda x: x.mean_is_right("encoder"),
    "trainer averages": lambda x: (
        x.option == "sum" and x.is_scaled("encoder", 1 / x.world_size) and x.is_scaled("loss", 1 / x.world_size)
    ),
    "trainer sums": lambda x: (
        bool(x.of("encoder"))
        and x.is_scaled("encoder", x.world_size)
        and (x.is_scaled("loss", x.world_size) or x.is_scaled("loss", 1.0))
    ),
    "own slice": lambda x: (
        x.option is None
        and bool(x.of("encoder"))
        and x.is_scaled("encoder", 1 / x.world_size)
        and x.is_scaled("loss", 1.0)
    ),
    "parameters not reduced": _lacks_parameter_reduction,
    "parameters scaled": lambda x: (
        bool(x.of("loss"))
        and x.is_scaled("encoder", 1.0)
        and any(x.is_scaled("loss", y) for y in (x.world_size, 1 / x.world_size))
    ),
}
"""Signatures of mistakes in the gradients of a step that is not right, in the order in which they are tried."""

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
