"""Torch's join context for ranks that run out of batches: a loss within it would wait for ever, so it is refused."""

import functools
from contextlib import suppress
from typing import Any

import torch.distributed as dist

_PROBLEM = (
    "DDP's join() is active. A rank that has run out of batches answers DDP's messages there, but not the loss's, and the "
    "others would wait for it. Leave join() out (with Accelerate: join_uneven_inputs), and give all ranks equally many "
    "batches, the last ones empty: GlobalBatchSampler does."
)

JOINED: list[Any] = []  # the contexts that this process is in


def join_problem() -> str | None:
    return _PROBLEM if any(context._enable for context in JOINED) else None


@functools.cache
def watch_joins() -> None:
    """Let torch's join context, which tells DDP modules only, tell of its entry, from the first wrapper on."""
    if not dist.is_available():
        return
    from torch.distributed.algorithms.join import Join  # imported here: torch may be built without distributed

    enter, leave = Join.__enter__, Join.__exit__

    @functools.wraps(enter)
    def entered(self: Any) -> Any:
        JOINED.append(self)
        return enter(self)

    @functools.wraps(leave)
    def left(self: Any, *error: Any) -> Any:
        with suppress(ValueError):  # the first wrapper was made inside of the context
            JOINED.remove(self)
        return leave(self, *error)

    Join.__enter__, Join.__exit__ = entered, left  # type: ignore[method-assign]  # torch has no hook for it
