"""The factor by which a script multiplies a loss before its backward pass, and what explains it."""

from __future__ import annotations

import math

from contrastive_zoo.testing.auditing.records import Call, Step

TOLERANCE = 1e-3
"""Relative difference below which a factor equals an expected one; factors of a reduced precision are powers of two."""


def is_near(x: float, y: float, tolerance: float = TOLERANCE) -> bool:
    """Return whether two numbers are equal up to rounding.

    Examples:
        >>> is_near(2.0001, 2), is_near(2.1, 2)
        (True, False)
    """
    return math.isclose(x, y, rel_tol=tolerance, abs_tol=0.0)


def factor(call: Call, step: Step) -> float:
    """Return the factor of a loss, relative to a mean over micro-batches: 1 in a right training without weights."""
    return (call.factor or 0.0) / step.scale * len(step.micro_batches)


def explanation(call: Call, step: Step, world_size: int) -> str | None:
    """Return the mistake that explains the factor of a loss: None for a factor of 1 and for a weight.

    Args:
        call: of the loss.
        step: that contains it.
        world_size: number of ranks W.
    """
    result, count = factor(call, step), len(step.micro_batches)
    mistakes = {  # where W equals the number of micro-batches, the simpler explanation comes first
        "accumulation not divided": count,
        "times W": world_size,
        "times W, accumulation not divided": world_size * count,
        "divided by W": 1 / world_size,
    }
    if is_near(result, 1.0):
        return None
    return next((mistake for mistake, expected in mistakes.items() if is_near(result, expected)), None)


def weight(call: Call, step: Step, world_size: int) -> float:
    """Return the weight that the script gives to a loss: its factor, unless a mistake explains it."""
    return 1.0 if explanation(call, step, world_size) else factor(call, step)
