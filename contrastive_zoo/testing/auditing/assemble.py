"""Turn the records of all ranks into a report: every quantity compared with one process, the mistakes, notes."""

import functools
import math
from collections.abc import Iterator, Sequence

import torch

from contrastive_zoo.testing.auditing.diagnosis import mistakes
from contrastive_zoo.testing.auditing.evidence import RunAgain, StepEvidence, undisturbed
from contrastive_zoo.testing.auditing.records import Record
from contrastive_zoo.testing.auditing.rerun import Setting
from contrastive_zoo.testing.evidence import ROUNDING_FACTOR
from contrastive_zoo.testing.mistakes import NOT_RECOGNISED, Diagnosis
from contrastive_zoo.testing.report import Quantity, WorldReport

LOCAL_MEAN = "each rank returns the loss of its own anchors"
"""Beginning of the note on a loss whose values differ between ranks and are right in the mean."""


def assemble(records: Sequence[Record], run: RunAgain) -> WorldReport:
    """Run the training again in one process; compare and diagnose."""
    report = WorldReport(len(records), min(x.finished for x in records), records[0].loss_names)
    report.seconds = max(x.seconds for x in records)
    report.problem = next((x.unrepeatable for x in records if x.unrepeatable), "")
    if report.problem:
        return report
    run = functools.cache(run)
    steps = [StepEvidence(index, records, run) for index in range(min(len(x.steps) for x in records))]
    compared = [*undisturbed(steps[: report.steps])]
    report.quantities = _largest([x.quantities for x in compared])
    report.findings = mistakes(records, steps)
    report.notes = list(dict.fromkeys(x for step in compared for x in _notes(step)))
    report.problem = _problem(records)
    report.peak_bytes = (max(x.peak_bytes for x in records), run(Setting()).peak_bytes if steps else 0)
    if report.differing and not report.findings:
        measured = "; ".join(f"{x.name} {x.ratio.error:.1%} off" for x in report.differing if x.ratio)
        report.findings = [Diagnosis(NOT_RECOGNISED, measured)]
    return report


def _problem(records: Sequence[Record]) -> str:
    errors = [f"rank {x.rank} raised {x.error}" for x in records if x.error]
    if not errors and not min(x.finished for x in records):
        errors.append("no step of an optimizer was finished on all ranks")
    errors += [f"--loss {name}: no module of such a class was called" for name in sorted(records[0].unknown_losses)]
    return "; ".join(errors)


# --- quantities -------------------------------------------------------------------------------------------------------


def _largest(steps: Sequence[Sequence[Quantity]]) -> list[Quantity]:
    """Return every quantity at the step where its error is largest; one that was once not compared was not compared."""
    largest: dict[str, Quantity] = {}
    for index, quantities in enumerate(steps):
        for quantity in quantities:
            quantity.step = index
            previous = largest.get(quantity.name)
            if previous is None or _severity(quantity) > _severity(previous):
                largest[quantity.name] = quantity
    return list(largest.values())


def _severity(x: Quantity) -> tuple[bool, bool, float]:
    if x.ratio is None:
        return (False, True, 0.0)
    return (x.ok is False, False, x.ratio.error if math.isfinite(x.ratio.error) else math.inf)


# --- notes ------------------------------------------------------------------------------------------------------------


def _notes(step: StepEvidence) -> Iterator[str]:
    first, rounding = step.ranks[0], ROUNDING_FACTOR * step.eps
    if first.micro_batches > 1:
        yield f"gradient accumulation of {first.micro_batches} micro-batches"
    if first.is_scaled:
        yield "GradScaler: gradients were compared after unscaling"
    for clip in dict.fromkeys(first.clips):
        yield f"{clip}: gradients were compared before clipping and after it"
    if not any(x.losses for x in step.ranks):
        yield (
            "the script calls no loss that the audit knows: the value is where the script starts its backward pass; a "
            "factor of accumulation is not checked unless you name the loss with --loss module:Class"
        )
    factor = first.factor
    if factor and step.one is not None and step.one.factor and not _is_whole(step.one.factor, first.micro_batches):
        yield f"the script multiplies the loss by {step.one.factor:.4g}, also in one process: a weight"
    is_equal = all(torch.allclose(step.values(x), step.values(first), rounding, rounding) for x in step.ranks)
    if not is_equal and step.is_local_mean:
        yield f"{LOCAL_MEAN}; the mean of the ranks is the value of one process: log that mean"
    if first.draws:
        yield (
            "the training draws random numbers on each rank (dropout), which is outside the contract: one process draws "
            "those of the ranks again"
        )
    if names := step.differing_tensors:
        yield f"{len(names)} buffers or tensors of modules differ between ranks after a step, such as {names[0]}"


def _is_whole(factor: float, count: int) -> bool:
    return any(math.isclose(factor, x, rel_tol=1e-3) for x in (1.0, count, 1 / count))
