"""Turn the records of all ranks into a report: every quantity compared with one process, the mistakes, notes."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from contrastive_zoo.testing.auditing.diagnosis import mistakes
from contrastive_zoo.testing.auditing.merging import NotComparable
from contrastive_zoo.testing.auditing.recorder import Recorder, peak_bytes
from contrastive_zoo.testing.auditing.records import FACTOR_TOLERANCE, Record
from contrastive_zoo.testing.auditing.replay import NOISE_FACTOR, ROUNDING_FACTOR, OneProcess, StepEvidence
from contrastive_zoo.testing.evidence import Ratio
from contrastive_zoo.testing.mistakes import NOT_RECOGNISED, Diagnosis
from contrastive_zoo.testing.report import Quantity, WorldReport

LARGEST_TOLERANCE = 0.3
"""A quantity that repetitions change by more is not compared."""

SHARDED = "each rank holds a part of the parameters (FSDP)"
"""Why the parameters of a group are not compared."""

LOCAL_MEAN = "each rank returns the loss of its own anchors"
"""Beginning of the note on a loss whose values differ between ranks and are right in the mean."""


def assemble(records: Sequence[Record], recorder: Recorder | None) -> WorldReport:
    """Repeat the steps that all ranks recorded, on copies of this rank's modules if there are any; compare and diagnose."""
    reason, one_process = "" if recorder else "no rank could repeat the steps", None
    if recorder is not None:
        try:
            one_process = OneProcess(recorder)
        except NotComparable as problem:
            reason = str(problem)
    ranks = [list(x) for x in zip(*(record.steps for record in records), strict=False)]
    evidence = [StepEvidence(x, records[0].groups, one_process, reason) for x in ranks]
    finished = min(x.finished for x in records)
    steps = evidence[:finished]
    report = WorldReport(len(records), finished, records[0].loss_names)
    report.findings = mistakes(records, evidence)
    report.quantities = _compared(steps)
    report.notes = list(dict.fromkeys([*_notes(steps), *_notes_on_changes(steps), *_notes_on_dropout(steps)]))
    report.problem = _problem(records)
    report.factors = [step.ranks[0].factor(x) for step in steps[:1] for x in step.ranks[0].losses]
    report.peak_bytes = (max(x.peak_bytes for x in records), peak_bytes())
    report.seconds = max(x.seconds for x in records)
    for x in report.quantities:
        x.is_noted = x.name == "value of the loss" and any(note.startswith(LOCAL_MEAN) for note in report.notes)
    unexplained = [x for x in report.quantities if x.ok is False and not x.is_noted]
    if unexplained and not report.findings:
        measured = "; ".join(f"{x.name} {x.ratio.error:.1%} off" for x in unexplained if x.ratio)
        report.findings = [Diagnosis(NOT_RECOGNISED, measured)]
    return report


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


# --- quantities -------------------------------------------------------------------------------------------------------


def _compared(steps: Sequence[StepEvidence]) -> list[Quantity]:
    """Return every quantity at the step where its error is largest, relative to the tolerance.

    A quantity that could not be compared at one step was not compared.
    """
    largest: dict[str, Quantity] = {}
    for index, step in enumerate(steps):
        for quantity in _quantities(step):
            quantity.step = index
            previous = largest.get(quantity.name)
            if previous is None or _severity(quantity) > _severity(previous):
                largest[quantity.name] = quantity
    return list(largest.values())


def _severity(x: Quantity) -> tuple[bool, bool, float]:
    if x.ratio is None:
        return (False, True, 0.0)
    return (x.ok is False, False, x.ratio.error if math.isfinite(x.ratio.error) else math.inf)


def _quantities(step: StepEvidence) -> Iterable[Quantity]:
    name = "value of the loss"
    if step.truth is None:
        yield Quantity(name, reason=step.reason)
    else:
        yield _judged(name, step.values, *step.reference("value"))
    kinds = (("gradient of the {}", _gradient), ("{} after the step", _after), ("{} equal on all ranks", _agreement))
    for text, compare in kinds:
        for group in ("encoder", "loss"):
            if names := step.names(group):
                name, is_sharded = text.format(group), step.is_sharded(names)
                yield Quantity(name, reason=SHARDED) if is_sharded else compare(name, step, group, names)


def _gradient(name: str, step: StepEvidence, group: str, names: Sequence[str]) -> Quantity:
    if step.truth is None or step.lacks_terms(names) or (group == "encoder" and step.truth.unlinked):
        return Quantity(name, reason=step.truth.unlinked if step.truth else step.reason)
    return _judged(name, [step.flat(x.gradients, names) for x in step.ranks], *step.reference(group))


def _after(name: str, step: StepEvidence, group: str, names: Sequence[str]) -> Quantity:
    reason = step.reason if step.truth is None else step.truth.unlinked or step.truth.problem
    if step.truth is None or reason or not (step.truth.after and step.ranks[0].after):
        return Quantity(name, reason=reason or "no optimizer step")
    names = [x for x in names if x in step.ranks[0].optimized]
    if not names:
        return Quantity(name, reason="no optimizer holds the parameters")
    # elements with a gradient above its noise; Adam divides the others by themselves: they move at random
    gradient = step.flat(step.truth.gradients, names)
    noise = torch.stack([(step.flat(x.gradients, names) - gradient).abs() for x in step.repetitions]).max(0).values
    kept = gradient.abs() > NOISE_FACTOR * (ROUNDING_FACTOR * step.eps * gradient.abs().max() + noise)
    if not kept.any():
        return Quantity(name, reason="all gradients are rounding")
    before = step.flat(step.ranks[0].state, names)[kept]
    truth, *repeated = [
        step.flat(x.after, names)[kept] - before for x in (step.truth, *step.repetitions) if x is step.truth or x.after
    ]
    rounding = step.eps * float(before.norm()) / max(float(truth.norm()), 1e-300)
    bound = max(step.tolerance(truth, repeated), rounding + ROUNDING_FACTOR * step.eps)
    return _judged(name, [step.flat(x.after, names)[kept] - before for x in step.ranks], truth, bound)


def _agreement(name: str, step: StepEvidence, group: str, names: Sequence[str]) -> Quantity:
    """Compare the parameters of all ranks with those of rank 0 after the step."""
    after = [step.flat(x.after, names) for x in step.ranks]
    return _judged(name, after, after[0], ROUNDING_FACTOR * step.eps)


def _judged(name: str, ranks: Iterable[Tensor], expected: Tensor, tolerance: float) -> Quantity:
    ratios = [Ratio.between(x, expected) for x in ranks]
    worst = max(ratios, key=lambda x: math.inf if math.isnan(x.error) else x.error)
    if tolerance > LARGEST_TOLERANCE or math.isnan(tolerance):
        return Quantity(name, reason=f"repetitions in one process differ: the tolerance would be {tolerance:.1e}")
    return Quantity(name, worst, tolerance)


# --- notes ------------------------------------------------------------------------------------------------------------


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
            yield f"not compared: {first.uncovered} gradients of parameters of no recorded encoder or loss"
        for call in first.losses:
            factor = first.factor(call)
            is_one = math.isclose(factor, 1.0, rel_tol=FACTOR_TOLERANCE)
            if call.factor and not is_one and first.explanation(call, step.world_size) is None:
                yield f"the script multiplies the loss by {factor:.4g}; the audit takes it for a weight"
        if step.truth is not None and step.truth.values:
            values, expected = step.values, torch.tensor(step.truth.values, dtype=torch.float64)
            bound = 100 * step.eps
            are_right = torch.allclose(values, expected.expand_as(values), bound, bound)
            if not are_right and torch.allclose(values.mean(0), expected, bound, bound):
                yield f"{LOCAL_MEAN}; the mean of the ranks is the value of one process: log that mean"


def _notes_on_dropout(steps: Sequence[StepEvidence]) -> Iterator[str]:
    """Say how far the gradient of the encoder moves with other random numbers, at the first step that draws some."""
    step = next((x for x in steps if x.draws and x.truth is not None), None)
    if step is None:
        return
    text = (
        "the encoder draws random numbers on each rank (dropout), which is outside the contract: the ranks' masks are used "
        "again in one process"
    )
    names = step.names("encoder")
    if step.together is not None and step.truth is not None and names:
        result = Ratio.between(step.flat(step.together.gradients, names), step.flat(step.truth.gradients, names))
        text += f"; with other masks the gradient of the encoder differs by {result.error:.0%}"
    yield text


def _notes_on_changes(steps: Sequence[StepEvidence]) -> Iterator[str]:
    """Compare the parameters after each step with those before the next one."""
    for index, (step, following) in enumerate(pairwise(steps)):
        for group in ("encoder", "loss"):
            names = step.names(group)
            if not names or step.is_sharded(names) or not step.ranks[0].after:
                continue
            before, after = step.flat(following.ranks[0].state, names), step.flat(step.ranks[0].after, names)
            if not torch.equal(before, after):
                yield (
                    f"the script changes parameters of the {group} between steps {index + 1} and {index + 2}, outside of "
                    f"the optimizer, by {Ratio.between(before, after).error:.1e}"
                )
