"""Functions of the user that run on one rank, while the other ranks wait for its next message."""

from collections.abc import Callable
from typing import TypeVar

from contrastive_zoo.session import meet
from contrastive_zoo.world import World

R = TypeVar("R")


def called_on_every_rank(caller: str, name: str, function: Callable[[], R], *, world: World) -> R:
    """Return this rank's result of a user's function; every rank calls it, and any rank's error is all ranks' error.

    Args:
        caller: the first word of the error.
        name: what the error calls the function, such as ``"the guide"``.
        function: runs on this rank.
        world: the ranks.

    Raises:
        ValueError: on every rank alike, the function raised on some rank; there it is ``__cause__``.

    Examples:
        >>> called_on_every_rank("mine", "the guide", lambda: 1 / 0, world=World())
        Traceback (most recent call last):
        ...
        ValueError: mine: the guide raised ZeroDivisionError: division by zero.
    """
    cause: Exception | None = None
    problem = None
    try:
        result = function()
    except Exception as error:
        cause, problem = error, f"{name} raised {type(error).__name__}: {str(error).rstrip('.')}."
    try:
        meet(caller, {}, world=world, problem=problem)
    except ValueError as error:
        raise error from cause
    return result
