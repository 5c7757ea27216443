"""torch's join context, for ranks that run out of batches, is noticed: it answers DDP's messages, not those of a loss."""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any

import torch.distributed as dist

_PROBLEM = (
    "DDP's join() is active. A rank that has run out of batches answers DDP's messages there, but not the loss's, and the "
    "others would wait for it. Leave join() out (with Accelerate: join_uneven_inputs), and give all ranks equally many "
    "batches, the last ones empty: GlobalBatchSampler does."
)

JOINED: list[Any] = []
"""The contexts that this process is in."""


def join_problem() -> str | None:
    """Return why a loss of several ranks cannot be computed now, in words; None outside of torch's join context.

    Examples:
        >>> join_problem()
    """
    return _PROBLEM if any(context._enable for context in JOINED) else None


def _watch(join: Any) -> None:
    """Let the class of the context tell of its entry: torch tells the DDP modules only, which a loss does not know."""
    enter, leave = join.__enter__, join.__exit__

    @functools.wraps(enter)
    def entered(self: Any) -> Any:
        JOINED.append(self)
        return enter(self)

    @functools.wraps(leave)
    def left(self: Any, *error: Any) -> Any:
        with suppress(ValueError):  # this module was imported inside of the context
            JOINED.remove(self)
        return leave(self, *error)

    join.__enter__, join.__exit__ = entered, left


if dist.is_available():
    from torch.distributed.algorithms.join import Join

    _watch(Join)
