"""Checks of values, such as labels: at once where the host can read them, in the next call where it would have to wait."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from contrastive_zoo import devices
from contrastive_zoo.later import ValueCheck


class ValueRule(NamedTuple):
    """What the values of labels, weights or the like must be, stated without reading them.

    Args:
        x: the tensor. Nothing is wrong with an empty one.
        numbers: returns a few integers or bools from x, on its device.
        problem: returns what is wrong, given these numbers; None if nothing is. It holds no tensor until the next call.

    Examples:
        >>> negative = lambda numbers: f"{numbers[0]} are negative." if numbers[0] else None
        >>> values_problem([ValueRule(torch.tensor([0.5, -1.0]), lambda x: (x < 0).sum(), negative)], None)
        '1 are negative.'
    """

    x: Tensor
    numbers: Callable[[Tensor], Tensor]
    problem: Callable[[Sequence[float]], str | None]


def values_problem(rules: Iterable[ValueRule], later: list[ValueCheck] | None, *, waits: bool = True) -> str | None:
    """Return what is wrong with values, in words; None if nothing is, or if it turns out in the next call.

    Values on a CPU are read at once. Compute with values that are not in a way that is safe for any.

    Args:
        rules: for the values of a call.
        later: takes the checks of values on an accelerator, which are copied without waiting; None where these are not
            checked.
        waits: whether values on an accelerator are read at once, too.
    """
    for rule in rules:
        if not rule.x.numel():
            continue
        if waits or devices.on_cpu(rule.x):
            if (problem := rule.problem(rule.numbers(rule.x.detach()).flatten().tolist())) is not None:
                return problem
        elif later is not None:
            later.append(ValueCheck(rule.numbers(rule.x.detach()).flatten(), rule.problem))
    return None


def range_rule(x: Tensor, low: int, high: int, problem: Callable[[int, int], str]) -> ValueRule:
    """Return the rule that integers are in low … high.

    Args:
        x: integers.
        low: the smallest that is allowed.
        high: the largest.
        problem: returns what is wrong, given the smallest and the largest of x.

    Examples:
        >>> rule = range_rule(torch.tensor([1, 7]), 0, 1, lambda least, most: f"got {least} … {most}.")
        >>> values_problem([rule], None)
        'got 1 … 7.'
    """

    def of_numbers(numbers: Sequence[float]) -> str | None:
        least, most = map(int, numbers)
        return None if low <= least and most <= high else problem(least, most)

    return ValueRule(x, _extremes, of_numbers)


def safe_index(index: Tensor, stop: int) -> Tensor:
    """Return indices into ``stop`` rows; on an accelerator, where they may be checked later, those outside are moved inside.

    CUDA ends the process at an index out of range. On a CPU they have been checked.

    Examples:
        >>> safe_index(torch.tensor([0, 7]), 5)
        tensor([0, 7])
    """
    return index if devices.on_cpu(index) else index.clamp(0, stop - 1)


def _extremes(x: Tensor) -> Tensor:
    integers = x.long()
    return torch.stack([integers.amin(), integers.amax()])
