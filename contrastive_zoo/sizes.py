"""Make the tensors and arrays whose sizes are settings."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def of_size(caller: str, make: Callable[[], T], **sizes: int) -> T:
    """Return ``make()``, a tensor or an array whose shape consists of these settings.

    Raises:
        ValueError: it cannot be made, for lack of memory. The errors of torch and NumPy name no setting.

    Examples:
        >>> import torch
        >>> of_size("Loss", lambda: torch.zeros(2**62, 3), embedding_size=2**62)
        Traceback (most recent call last):
        ...
        ValueError: Loss: nothing can be made of embedding_size=4611686018427387904 (...). Pass smaller sizes.
    """
    try:
        return make()
    except (RuntimeError, MemoryError, ValueError) as error:
        given = ", ".join(f"{name}={size}" for name, size in sizes.items())
        reason = f"{error}".partition("\n")[0][:120] or type(error).__name__
        raise ValueError(f"{caller}: nothing can be made of {given} ({reason}). Pass smaller sizes.") from error
