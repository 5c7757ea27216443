"""Checks of values, such as labels: at once where the host can read them, in the next call where it would have to wait."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from contrastive_zoo import devices
from contrastive_zoo.later import ValueCheck
from contrastive_zoo.session import Session
from contrastive_zoo.world import World


def values_are_read(x: Tensor, world: World) -> bool:
    """Return whether checks read values of x at once: on a CPU, and without ``DistributedLoss`` also on an accelerator.

    Examples:
        >>> values_are_read(torch.arange(2), World())
        True
    """
    return devices.on_cpu(x) or not isinstance(world, Session) or world.options.reads_values


def value_problem(
    x: Tensor,
    numbers: Callable[[Tensor], Tensor],
    problem: Callable[[Sequence[float]], str | None],
    *,
    world: World,
) -> str | None:
    """Return what is wrong with values of x, in words; None if nothing is, or if it turns out in the next call.

    ``DistributedLoss`` copies the numbers from an accelerator without waiting, and reads them in the next call. With
    ``check_finite=False`` it does not. Compute with values that are not read at once in a way that is safe for any.

    Args:
        x: labels, weights or the like. Nothing is wrong with an empty one.
        numbers: returns a few integers or bools from x, on its device.
        problem: returns what is wrong, given these numbers; None if nothing is. It holds no tensor until the next call.
        world: the ranks, or the session of a step.

    Examples:
        >>> negative = lambda numbers: f"{numbers[0]} are negative." if numbers[0] else None
        >>> value_problem(torch.tensor([0.5, -1.0]), lambda x: (x < 0).sum(), negative, world=World())
        '1 are negative.'
    """
    if not x.numel():
        return None
    if values_are_read(x, world):
        return problem(numbers(x.detach()).flatten().tolist())
    assert isinstance(world, Session)
    if world.progress.later is not None and world.progress.declaring is None:  # each is declared, then computed
        world.progress.later.append(ValueCheck(numbers(x.detach()).flatten(), problem))
    return None


def range_problem(x: Tensor, low: int, high: int, problem: Callable[[int, int], str], *, world: World) -> str | None:
    """Return what :func:`value_problem` does, if some integers are not in low … high.

    Args:
        x: integers.
        low: the smallest that is allowed.
        high: the largest.
        problem: returns what is wrong, given the smallest and the largest of x.
        world: the ranks, or the session of a step.

    Examples:
        >>> range_problem(torch.tensor([1, 7]), 0, 1, lambda least, most: f"got {least} … {most}.", world=World())
        'got 1 … 7.'
    """

    def of_numbers(numbers: Sequence[float]) -> str | None:
        least, most = map(int, numbers)
        return None if low <= least and most <= high else problem(least, most)

    return value_problem(x, _extremes, of_numbers, world=world)


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
