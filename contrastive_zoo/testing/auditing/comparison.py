"""Compare the steps of all ranks with the same steps in one process, quantity by quantity."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from contrastive_zoo.testing.auditing.step_evidence import StepEvidence
from contrastive_zoo.testing.evidence import Ratio
from contrastive_zoo.testing.report import Quantity

NOISE_FACTOR, ROUNDING_FACTOR = 10.0, 100.0
"""A tolerance is this often the largest difference between repetitions, plus this often the unit of rounding."""

LARGEST_TOLERANCE = 0.3
"""A quantity that repetitions change by more is not compared."""

Group = Literal["encoder", "loss"]


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
    groups: tuple[Group, ...] = ("encoder", "loss")
    for group in groups:
        if names := step.names(group):
            yield _gradient(step, group, names)
    for group in groups:
        if names := step.names(group):
            yield _after(step, group, names)
    for group in groups:
        if names := step.names(group):
            yield _agreement(step, group, names)


def _value(step: StepEvidence) -> Quantity:
    name = "value of the loss"
    if step.truth is None:
        return Quantity(name, reason=step.reason)
    expected = torch.tensor(step.truth.values, dtype=torch.float64)
    noise = _noise(expected, [torch.tensor(x.values, dtype=torch.float64) for x in step.repetitions])
    ratios = [Ratio.between(torch.tensor(values, dtype=torch.float64), expected) for values in step.values]
    return _judged(name, ratios, noise, step.eps)


def _gradient(step: StepEvidence, group: Group, names: Sequence[str]) -> Quantity:
    name = f"gradient of the {group}"
    if step.truth is None or step.lacks_terms(names) or (group == "encoder" and step.truth.unlinked):
        return Quantity(name, reason=step.truth.unlinked if step.truth else step.reason)
    if step.is_sharded(names):
        return Quantity(name, reason="each rank holds a part of the parameters (FSDP)")
    expected = flat(step.truth.gradients, names, step)
    noise = _noise(expected, [flat(x.gradients, names, step) for x in step.repetitions])
    ratios = [Ratio.between(flat(x.gradients, names, step), expected) for x in step.ranks]
    return _judged(name, ratios, noise, step.eps)


def _after(step: StepEvidence, group: Group, names: Sequence[str]) -> Quantity:
    name = f"{group} after the step"
    reason = step.reason if step.truth is None else step.truth.unlinked or step.truth.problem
    if step.is_sharded(names):
        reason = "each rank holds a part of the parameters (FSDP)"
    if step.truth is None or reason or not (step.truth.after and step.ranks[0].after):
        return Quantity(name, reason=reason or "no optimizer step")
    names = [x for x in names if x in step.ranks[0].optimized]
    if not names:
        return Quantity(name, reason="no optimizer holds the parameters")
    kept = _above_noise(step, names)
    if not kept.any():
        return Quantity(name, reason="all gradients are rounding")
    before = flat(step.ranks[0].state, names, step)[kept]
    expected = flat(step.truth.after, names, step)[kept] - before
    repeated = [flat(x.after, names, step)[kept] - before for x in step.repetitions if x.after]
    ratios = [Ratio.between(flat(x.after, names, step)[kept] - before, expected) for x in step.ranks]
    rounding = step.eps * float(before.double().norm()) / max(float(expected.double().norm()), 1e-300)
    return _judged(name, ratios, max(_noise(expected, repeated), rounding / NOISE_FACTOR), step.eps)


def _above_noise(step: StepEvidence, names: Sequence[str]) -> Tensor:
    """Return which elements have a gradient above its noise; Adam divides the others by themselves: they move at random."""
    assert step.truth is not None
    gradient = flat(step.truth.gradients, names, step)
    noise = [(flat(x.gradients, names, step) - gradient).abs() for x in step.repetitions]
    bound = NOISE_FACTOR * (ROUNDING_FACTOR * step.eps * gradient.abs().max() + torch.stack(noise).max(0).values)
    return gradient.abs() > bound


def _agreement(step: StepEvidence, group: Group, names: Sequence[str]) -> Quantity:
    """Compare the parameters of all ranks with those of rank 0 after the step."""
    name = f"{group} equal on all ranks"
    if step.is_sharded(names):
        return Quantity(name, reason="each rank holds a part of the parameters (FSDP)")
    first = flat(step.ranks[0].after, names, step)
    ratios = [Ratio.between(flat(x.after, names, step), first) for x in step.ranks[1:]]
    return _judged(name, ratios or [Ratio(1.0, 1.0, 0.0)], 0.0, step.eps)


def flat(tensors: Mapping[str, Tensor], names: Sequence[str], step: StepEvidence) -> Tensor:
    """Return these parameters' tensors as one vector; a missing one counts as zero."""
    like = step.ranks[0].state
    return torch.cat([tensors.get(name, torch.zeros_like(like[name])).flatten().double() for name in names])


def tolerance(step: StepEvidence, group: str) -> float:
    """Return the largest relative error of a right ``"value"``, or of the right gradient of a group."""
    assert step.truth is not None
    if group == "value":
        expected = torch.tensor(step.truth.values, dtype=torch.float64)
        repeated = [torch.tensor(x.values, dtype=torch.float64) for x in step.repetitions]
    else:
        names = step.names(group)
        expected = flat(step.truth.gradients, names, step)
        repeated = [flat(x.gradients, names, step) for x in step.repetitions]
    return NOISE_FACTOR * _noise(expected, repeated) + ROUNDING_FACTOR * step.eps


def _noise(expected: Tensor, repeated: Sequence[Tensor]) -> float:
    return max((Ratio.between(x, expected).error for x in repeated), default=0.0)


def _judged(name: str, ratios: Sequence[Ratio], noise: float, eps: float) -> Quantity:
    worst = max(ratios, key=lambda x: math.inf if math.isnan(x.error) else x.error)
    tolerance = NOISE_FACTOR * noise + ROUNDING_FACTOR * eps
    if tolerance > LARGEST_TOLERANCE or math.isnan(tolerance):
        reason = f"repetitions in one process differ by {noise:.1e}"
        return Quantity(name, reason=reason)
    return Quantity(name, worst, tolerance)
