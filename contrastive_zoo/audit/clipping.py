"""Record gradients before they are clipped: ``torch.nn.utils`` has no hook, so its functions are wrapped for the while."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

FUNCTIONS = ("clip_grad_norm_", "clip_grad_value_")
"""The functions of ``torch.nn.utils`` that are watched; trainers call these, too."""


class ClipWatch:
    """Call ``on_clip(function, parameters, arguments)`` before gradients are clipped.

    Examples:
        >>> watch = ClipWatch(lambda name, parameters, rest: print(name, len(parameters), rest))
        >>> parameter = torch.nn.Parameter(torch.ones(1))
        >>> parameter.grad = torch.ones(1)
        >>> watch.start()
        >>> torch.nn.utils.clip_grad_norm_([parameter], 0.5)
        clip_grad_norm_ 1 ((0.5,), {})
        tensor(1.)
        >>> watch.stop()
    """

    def __init__(self, on_clip: Callable[[str, list[Tensor], Any], None]) -> None:
        self.on_clip = on_clip
        self._originals: list[tuple[Any, str, Any]] = []

    def start(self) -> None:
        """Wrap the functions."""
        for name in FUNCTIONS:
            for home in (torch.nn.utils, torch.nn.utils.clip_grad):
                original = getattr(home, name)
                self._originals.append((home, name, original))
                setattr(home, name, self._wrapped(name, original))

    def stop(self) -> None:
        """Restore the functions."""
        while self._originals:
            setattr(*self._originals.pop())

    def _wrapped(self, name: str, original: Any) -> Any:
        @functools.wraps(original)
        def clip(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
            listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            self.on_clip(name, listed, (args, kwargs))
            return original(listed, *args, **kwargs)

        return clip
