"""Settings: conversions of numbers, what is wrong with words and flags, and tensors of their size."""

from collections.abc import Callable
from typing import Any, TypeVar, get_args

import numpy as np
from torch import Tensor

from contrastive_zoo.ranks.row_checks import described


def real(x: Any) -> Any:
    """Return a tensor of shape [1] as [], a Python or NumPy number as float, and anything else unchanged.

    A parameter of shape [1] would change dtype and shape of the loss by promotion. A NumPy float32 number would reduce
    the precision of results that are computed from it.
    """
    if isinstance(x, Tensor):
        return x.reshape(()) if x.shape == (1,) else x
    is_number = isinstance(x, (int, np.integer, np.floating)) and not isinstance(x, bool)
    return float(x) if is_number else x


def move_towards(state: Tensor, target: Tensor, share: float | Tensor) -> None:
    """Move ``state`` in place by a share of the way to ``target``; a share that is a tensor may have any dtype."""
    state.lerp_(target.to(state), real(share).to(state) if isinstance(share, Tensor) else share)


def word_problem(name: str, word: object, words: Any, *, one_of: bool = False) -> str | None:
    """Return what is wrong with a word that must be one of a Literal, or None."""
    allowed = get_args(words)
    listed = f"one of {', '.join(map(repr, allowed))}" if one_of else " or ".join(map(repr, allowed))
    return None if isinstance(word, str) and word in allowed else f"{name} is {listed}, got {word!r}."


def flag_problem(**flags: object) -> str | None:
    """Return what is wrong with settings that must be True or False, or None."""
    for name, x in flags.items():
        if not isinstance(x, (bool, np.bool_)):
            return f"{name} is True or False, got {described(x)}."
    return None


def instance_problem(loss: object) -> str | None:
    """Return an error message for a loss class in place of its instance, or None."""
    if not isinstance(loss, type):
        return None
    return f"pass an instance, {loss.__name__}(...), not the class {loss.__name__}."


T = TypeVar("T")


def of_size(caller: str, make: Callable[[], T], **sizes: int) -> T:
    """Return ``make()``, a tensor or an array whose shape consists of these settings.

    Raises:
        ValueError: it cannot be made, for lack of memory. The errors of torch and NumPy name no setting.
    """
    try:
        return make()
    except (RuntimeError, MemoryError, ValueError) as error:
        arguments = ", ".join(f"{name}={size}" for name, size in sizes.items())
        reason = f"{error}".partition("\n")[0][:120] or type(error).__name__
        raise ValueError(f"{caller}: nothing can be made of {arguments} ({reason}). Pass smaller sizes.") from error
