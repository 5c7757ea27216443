"""Turn the records of all ranks into a report: every quantity compared with one process, the mistakes, notes."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from contrastive_zoo.testing.auditing.diagnosis import mistakes
from contrastive_zoo.testing.auditing.evidence import (
    Reruns,
    RunAgain,
    StepEvidence,
    Vector,
    flat,
)
from contrastive_zoo.testing.auditing.records import Record, Step
from contrastive_zoo.testing.auditing.rerun import Setting
from contrastive_zoo.testing.mistakes import NOT_RECOGNISED, Diagnosis
from contrastive_zoo.testing.noise import ROUNDING_FACTOR
from contrastive_zoo.testing.report import Quantity, WorldReport

LARGEST_TOLERANCE = 0.3
"""A quantity that reruns change by more is not compared."""

LOCAL_MEAN = "each rank returns the loss of its own anchors"
"""Beginning of the note on a loss whose values differ between ranks and are right in the mean."""


def assemble(records: Sequence[Record], run: RunAgain | None) -> WorldReport:
    """Run the training again in one process; compare and diagnose."""
    finished, reason = min(x.finished for x in records), "" if run else "no process could run the training again"
    if problem := next((x.unrepeatable for x in records if x.unrepeatable), ""):
        return WorldReport(len(records), finished, records[0].loss_names, problem=problem)
    begun = min(len(x.steps) for x in records)
    reruns = Reruns(run or (lambda _: Record()), records)
    if run is not None and begun:
        one = reruns(Setting())
        if not one.steps:
            reason = (
                f"in one process the script raises {one.error}" if one.error else "in one process nothing is trained"
            )
    report = WorldReport(len(records), finished, records[0].loss_names)
    steps = [StepEvidence(index, records, reruns, reason) for index in range(begun)]
    quantities: list[list[Quantity]] = []
    for step in steps[:finished]:
        if step.follows_difference:
            break
        quantities.append(_compared(step))
        if any(x.ok is False and not x.is_noted for x in quantities[-1]):
            for x in steps[step.index + 1 :]:
                x.follows_difference = True
    report.quantities = _largest(quantities)
    report.findings = mistakes(records, steps)
    report.notes = list(dict.fromkeys(x for step in steps[: len(quantities)] for x in _notes(step)))
    report.problem = _problem(records)
    report.peak_bytes = (max(x.peak_bytes for x in records), reruns(Setting()).peak_bytes if run and begun else 0)
    report.seconds = max(x.seconds for x in records)
    unexplained = [x for x in report.quantities if x.ok is False and not x.is_noted]
    if unexplained and not report.findings:
        measured = "; ".join(f"{x.name} {x.ratio.error:.1%} off" for x in unexplained if x.ratio)
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


def _compared(step: StepEvidence) -> list[Quantity]:
    value = _judged(step, "value of the loss", step.values)
    value.is_noted = value.ok is False and _is_local_mean(step)
    result = [value]
    names_of = {group: names for group in ("encoder", "loss") if (names := step.names(group))}
    result += [_judged(step, f"gradient of the {group}", step.gradient(x)) for group, x in names_of.items()]
    if any(x.clips for x in step.ranks):
        names = sorted({name for x in step.ranks for name in x.received})
        result.append(_judged(step, "gradient after clipping", lambda x: flat(x.received, names)))
    result += [_moved(step, f"{group} after the step", x) for group, x in names_of.items()]
    if (names := step.other_parameters) and step.one is not None:
        result.append(_others(step, names))
    for group, names in names_of.items():
        after = [flat(x.after, names) for x in step.ranks]
        worst = step.worst(after, after[0])
        result.append(Quantity(f"{group} equal on all ranks", worst, ROUNDING_FACTOR * step.eps))
    return result


def _judged(step: StepEvidence, name: str, vector: Vector, floor: float = 0.0) -> Quantity:
    """Compare a quantity of all ranks with one process; the noise is measured where they differ by more than rounding."""
    if step.one is None:
        return Quantity(name, reason=step.reason)
    worst = step.worst(map(vector, step.ranks), vector(step.one))
    tolerance = floor + ROUNDING_FACTOR * step.eps
    if not worst.error <= tolerance:
        tolerance = step.tolerance(vector, floor)
    if tolerance > LARGEST_TOLERANCE or math.isnan(tolerance):
        return Quantity(name, reason=f"reruns in one process differ: the tolerance would be {tolerance:.1e}")
    if not worst.error <= tolerance and step.problem:
        return Quantity(name, reason=step.problem)
    return Quantity(name, worst, tolerance)


def _moved(step: StepEvidence, name: str, names: Sequence[str]) -> Quantity:
    """Compare what the optimizer adds, weighted by the gradient: Adam moves elements without gradient at random."""
    names = [x for x in names if x in step.ranks[0].optimized]
    if not names:
        return Quantity(name, reason="no optimizer holds the parameters")

    def vector(x: Step) -> Tensor:
        norm = math.hypot(*(x.norms.get(y, (0.0, 0.0))[0] for y in names))
        return flat(x.moved, names) / (norm or 1.0)

    if step.one is None:
        return Quantity(name, reason=step.reason)
    norms = [step.one.norms.get(x, (0.0, 0.0)) for x in names]
    moved = float(vector(step.one).norm()) * (math.hypot(*(x for x, _ in norms)) or 1.0)
    rounding = step.eps * math.hypot(*(x for _, x in norms)) / max(moved, 1e-300)
    return _judged(step, name, vector, rounding)


def _others(step: StepEvidence, names: Sequence[str]) -> Quantity:
    """Compare how far other parameters, as those of a teacher, have moved since the start."""
    start = flat(step.records[0].start, names)
    assert step.one is not None
    moved = float((flat(step.one.after, names) - start).norm())
    rounding = 10 * step.eps * float(start.norm()) / moved if moved else 0.0
    return _judged(step, "other parameters after the step", lambda x: flat(x.after, names) - start, rounding)


def _is_local_mean(step: StepEvidence) -> bool:
    """Return whether the mean of the ranks' values is that of one process, but no value is."""
    if step.one is None:
        return False
    values, expected = torch.stack([step.values(x) for x in step.ranks]), step.values(step.one)
    bound = step.tolerance(step.values)
    return torch.allclose(values.mean(0), expected, bound, bound)


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
    if not is_equal and _is_local_mean(step):
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
