"""Code of the user that every rank runs alike: if it fails on some ranks, all of them raise."""

from collections.abc import Callable
from typing import TypeVar

from contrastive_zoo.differences import combined
from contrastive_zoo.world import World

R = TypeVar("R")


def failing_together(caller: str, function: Callable[[], R], world: World) -> R:
    """Return the function's result on this rank, after every rank has computed its own; one number is exchanged.

    A state may move afterwards: it moves on all ranks or on none. The function sends no messages.

    Args:
        caller: the first word of the error.
        function: runs on every rank.
        world: the ranks.

    Raises:
        ValueError: on every rank alike, the function raised on some ranks only; there its error is ``__cause__``. What
            it raises on every rank is raised as it is.

    Examples:
        >>> failing_together("Loss", lambda: 3, World())
        3
    """
    if world.size == 1:
        return function()
    try:
        result, error = function(), None
    except Exception as raised:
        error = raised
    failed = [bool(x) for (x,) in world.exchange([error is not None])]
    if not any(failed):
        return result
    if error is not None and all(failed):
        raise error
    words = "" if error is None else f"{type(error).__name__}: {str(error).rstrip('.')}."
    raise ValueError(f"{caller}: {combined(world.exchange_text(words))}") from error
