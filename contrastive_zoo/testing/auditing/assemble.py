"""Turn the records of all ranks into a report."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from contrastive_zoo.testing.auditing.comparison import compared, flat
from contrastive_zoo.testing.auditing.diagnosis import mistakes
from contrastive_zoo.testing.auditing.factors import explanation, factor, is_near
from contrastive_zoo.testing.auditing.merging import NotComparable
from contrastive_zoo.testing.auditing.one_process import OneProcess
from contrastive_zoo.testing.auditing.recorder import Recorder
from contrastive_zoo.testing.auditing.records import Record
from contrastive_zoo.testing.auditing.step_evidence import StepEvidence, gather_evidence
from contrastive_zoo.testing.evidence import Ratio
from contrastive_zoo.testing.mistakes import NOT_RECOGNISED, Diagnosis
from contrastive_zoo.testing.report import Quantity, WorldReport


def assemble(records: Sequence[Record], recorder: Recorder | None) -> WorldReport:
    """Repeat the recorded steps in this process, compare and diagnose.

    Args:
        records: of all ranks, in rank order.
        recorder: of this rank, whose modules repeat the steps; None if there is none.
    """
    reason, one_process = "" if recorder else "no rank could repeat the steps", None
    if recorder is not None:
        try:
            one_process = OneProcess(recorder)
        except NotComparable as problem:
            reason = str(problem)
    steps = gather_evidence(records, one_process, reason)
    finished = min(x.finished for x in records)
    report = WorldReport(len(records), finished, records[0].loss_names)
    report.findings = mistakes(records, steps)
    report.quantities = compared(steps[:finished])
    probes = (_notes, _notes_on_changes, _notes_on_dropout)
    report.notes = list(dict.fromkeys(note for probe in probes for note in probe(steps[:finished])))
    report.problem = _problem(records)
    report.factors = [factor(x, step.ranks[0]) for step in steps[:1] for x in step.ranks[0].losses]
    report.peak_bytes = (max(x.peak_bytes for x in records), peak_bytes())
    report.seconds = max(x.seconds for x in records)
    for x in report.quantities:
        x.is_noted = x.name == "value of the loss" and any(note.startswith(_LOCAL_MEAN) for note in report.notes)
    report.findings = report.findings or unexplained(report.quantities)
    return report


def unexplained(quantities: Sequence[Quantity]) -> list[Diagnosis]:
    """Return a finding of no known mistake if a quantity is not the same.

    Examples:
        >>> print(unexplained([Quantity("value of the loss", Ratio(2.0, 1.0, 1.0, 0.0), 1e-6)])[0].measured)
        value of the loss 100.0% off
        >>> unexplained([Quantity("value of the loss", Ratio(1.0, 1.0, 0.0, 0.0), 1e-6)])
        []
    """
    wrong = [x for x in quantities if x.ok is False and not x.is_noted and x.ratio]
    measured = "; ".join(f"{x.name} {x.ratio.error:.1%} off" for x in wrong if x.ratio)
    return [Diagnosis(NOT_RECOGNISED, measured)] if wrong else []


def _problem(records: Sequence[Record]) -> str:
    errors = [f"rank {x.rank} raised {x.error}" for x in records if x.error]
    if not any(x.losses for record in records for x in record.steps):
        errors.append(
            "no loss was called: losses of contrastive_zoo, pytorch-metric-learning and sentence-transformers are found; "
            "name another one with --loss module:Class"
        )
    elif not min(x.finished for x in records):
        errors.append("no step was finished on all ranks")
    return "; ".join(errors)


_LOCAL_MEAN = "each rank returns the loss of its own anchors"


def _notes(steps: Sequence[StepEvidence]) -> Iterator[str]:
    for step in steps:
        first = step.ranks[0]
        if len(first.micro_batches) > 1:
            yield f"gradient accumulation of {len(first.micro_batches)} micro-batches"
        if first.scale != 1:
            yield "GradScaler: gradients were compared after unscaling"
        for clip in first.clips:
            yield f"{clip.function}: gradients were compared before clipping"
        if first.uncovered:
            yield (f"not compared: {len(first.uncovered)} gradients of parameters of no recorded encoder or loss")
        for call in first.losses:
            result = factor(call, first)
            if call.factor and not is_near(result, 1.0) and explanation(call, first, step.world_size) is None:
                yield f"the script multiplies the loss by {result:.4g}; the audit takes it for a weight"
        yield from _notes_on_values(step)


def _notes_on_values(step: StepEvidence) -> Iterator[str]:
    if step.truth is None or not step.truth.values:
        return
    values = torch.tensor(step.values, dtype=torch.float64)
    expected = torch.tensor(step.truth.values, dtype=torch.float64)
    bound = 100 * step.eps
    if not torch.allclose(values, expected.expand_as(values), bound, bound) and torch.allclose(
        values.mean(0), expected, bound, bound
    ):
        yield f"{_LOCAL_MEAN}; the mean of the ranks is the value of one process: log that mean"


def _notes_on_dropout(steps: Sequence[StepEvidence]) -> Iterator[str]:
    """Say how far the gradient of the encoder moves with other random numbers, at the first step that draws some."""
    drawn = [step for step in steps if step.draws and step.truth is not None]
    if not drawn:
        return
    text = (
        "the encoder draws random numbers on each rank (dropout), which is outside the contract: the ranks' masks are used "
        "again in one process"
    )
    step, names = drawn[0], drawn[0].names("encoder")
    if step.together is not None and step.truth is not None and names:
        result = Ratio.between(flat(step.together.gradients, names, step), flat(step.truth.gradients, names, step))
        text += f"; with other masks the gradient of the encoder differs by {result.error:.0%}"
    yield text


def _notes_on_changes(steps: Sequence[StepEvidence]) -> Iterator[str]:
    """Compare the parameters after each step with those before the next one."""
    for index, (step, following) in enumerate(pairwise(steps)):
        for group in ("encoder", "loss"):
            names = step.names(group)
            if not names or step.is_sharded(names) or not step.ranks[0].after:
                continue
            before, after = flat(following.ranks[0].state, names, step), flat(step.ranks[0].after, names, step)
            if not torch.equal(before, after):
                yield (
                    f"the script changes parameters of the {group} between steps {index + 1} and {index + 2}, outside of "
                    f"the optimizer, by {Ratio.between(before, after).error:.1e}"
                )


def peak_bytes() -> int:
    """Return the peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
