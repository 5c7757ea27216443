"""Compare the steps of all ranks with the same steps in one process, quantity by quantity."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from contrastive_zoo.testing.auditing.step_evidence import StepEvidence
from contrastive_zoo.testing.evidence import Ratio
from contrastive_zoo.testing.report import Quantity

NOISE_FACTOR, ROUNDING_FACTOR = 10.0, 100.0
"""A tolerance is this often the largest difference between repetitions, plus this often the unit of rounding."""

LARGEST_TOLERANCE = 0.3
"""A quantity that repetitions change by more is not compared."""

SHARDED = "each rank holds a part of the parameters (FSDP)"
"""Why the parameters of a group are not compared."""


def compared(steps: Sequence[StepEvidence]) -> list[Quantity]:
    """Return every quantity at the step where its error is largest, relative to the tolerance.

    A quantity that could not be compared at one step was not compared.
    """
    rows: dict[str, Quantity] = {}
    for index, step in enumerate(steps):
        for quantity in _quantities(step):
            quantity.step = index
            previous = rows.get(quantity.name)
            if previous is None or _severity(quantity) > _severity(previous):
                rows[quantity.name] = quantity
    return list(rows.values())


def _severity(x: Quantity) -> tuple[bool, bool, float]:
    if x.ratio is None:
        return (False, True, 0.0)
    return (x.ok is False, False, x.ratio.error if math.isfinite(x.ratio.error) else math.inf)


def _quantities(step: StepEvidence) -> Iterable[Quantity]:
    yield _value(step)
    kinds = (("gradient of the {}", _gradient), ("{} after the step", _after), ("{} equal on all ranks", _agreement))
    for text, compare in kinds:
        for group in ("encoder", "loss"):
            if names := step.names(group):
                name, is_sharded = text.format(group), step.is_sharded(names)
                yield Quantity(name, reason=SHARDED) if is_sharded else compare(name, step, group, names)


def _value(step: StepEvidence) -> Quantity:
    name = "value of the loss"
    if step.truth is None:
        return Quantity(name, reason=step.reason)
    return _judged(name, [torch.tensor(x, dtype=torch.float64) for x in step.values], *reference(step, "value"))


def _gradient(name: str, step: StepEvidence, group: str, names: Sequence[str]) -> Quantity:
    if step.truth is None or step.lacks_terms(names) or (group == "encoder" and step.truth.unlinked):
        return Quantity(name, reason=step.truth.unlinked if step.truth else step.reason)
    return _judged(name, [flat(x.gradients, names, step) for x in step.ranks], *reference(step, group))


def _after(name: str, step: StepEvidence, group: str, names: Sequence[str]) -> Quantity:
    reason = step.reason if step.truth is None else step.truth.unlinked or step.truth.problem
    if step.truth is None or reason or not (step.truth.after and step.ranks[0].after):
        return Quantity(name, reason=reason or "no optimizer step")
    names = [x for x in names if x in step.ranks[0].optimized]
    if not names:
        return Quantity(name, reason="no optimizer holds the parameters")
    kept = _above_noise(step, names)
    if not kept.any():
        return Quantity(name, reason="all gradients are rounding")
    before = flat(step.ranks[0].state, names, step)[kept]
    truth, *repeated = [
        flat(x.after, names, step)[kept] - before for x in (step.truth, *step.repetitions) if x is step.truth or x.after
    ]
    rounding = step.eps * float(before.norm()) / max(float(truth.norm()), 1e-300)
    bound = max(_tolerance(truth, repeated, step.eps), rounding + ROUNDING_FACTOR * step.eps)
    return _judged(name, [flat(x.after, names, step)[kept] - before for x in step.ranks], truth, bound)


def _agreement(name: str, step: StepEvidence, group: str, names: Sequence[str]) -> Quantity:
    """Compare the parameters of all ranks with those of rank 0 after the step."""
    after = [flat(x.after, names, step) for x in step.ranks]
    return _judged(name, after, after[0], ROUNDING_FACTOR * step.eps)


def _above_noise(step: StepEvidence, names: Sequence[str]) -> Tensor:
    """Return which elements have a gradient above its noise; Adam divides the others by themselves: they move at random."""
    assert step.truth is not None
    gradient = flat(step.truth.gradients, names, step)
    noise = [(flat(x.gradients, names, step) - gradient).abs() for x in step.repetitions]
    bound = NOISE_FACTOR * (ROUNDING_FACTOR * step.eps * gradient.abs().max() + torch.stack(noise).max(0).values)
    return gradient.abs() > bound


def flat(tensors: Mapping[str, Tensor], names: Sequence[str], step: StepEvidence) -> Tensor:
    """Return these parameters' tensors as one vector; a missing one counts as zero."""
    like = step.ranks[0].state
    return torch.cat([tensors.get(name, torch.zeros_like(like[name])).flatten().double() for name in names])


def reference(step: StepEvidence, of: str) -> tuple[Tensor, float]:
    """Return the ``"value"`` of one process, or the gradient of a group, and the largest relative error of a right one."""
    assert step.truth is not None
    names = [] if of == "value" else step.names(of)
    truth, *repeated = [
        flat(x.gradients, names, step) if names else torch.tensor(x.values, dtype=torch.float64)
        for x in (step.truth, *step.repetitions)
    ]
    return truth, _tolerance(truth, repeated, step.eps)


def _tolerance(expected: Tensor, repeated: Sequence[Tensor], eps: float) -> float:
    noise = max((Ratio.between(x, expected).error for x in repeated), default=0.0)
    return NOISE_FACTOR * noise + ROUNDING_FACTOR * eps


def _judged(name: str, ranks: Sequence[Tensor], expected: Tensor, tolerance: float) -> Quantity:
    ratios = [Ratio.between(x, expected) for x in ranks]
    worst = max(ratios, key=lambda x: math.inf if math.isnan(x.error) else x.error)
    if tolerance > LARGEST_TOLERANCE or math.isnan(tolerance):
        return Quantity(name, reason=f"repetitions in one process differ: the tolerance would be {tolerance:.1e}")
    return Quantity(name, worst, tolerance)
