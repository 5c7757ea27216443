"""Torch's join context for ranks that run out of batches: a loss within it would wait for ever, so it is refused."""

import functools
from collections.abc import Callable
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
    if dist.is_available():
        from torch.distributed.algorithms.join import Join  # imported here: torch may be built without distributed

        Join.__enter__, Join.__exit__ = _counted(Join.__enter__, 1), _counted(Join.__exit__, 0)  # type: ignore[method-assign]  # torch has no hook for it


def _counted(method: Callable[..., Any], held: int) -> Callable[..., Any]:
    @functools.wraps(method)
    def counted(self: Any, *args: Any) -> Any:
        JOINED[:] = [x for x in JOINED if x is not self] + [self] * held
        return method(self, *args)

    return counted
