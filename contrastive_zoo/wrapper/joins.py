"""Torch's join context for ranks that run out of batches: a loss within it would wait for ever, so it is refused."""

from contextlib import suppress
from typing import Any

from torch.distributed.algorithms.join import Join

_PROBLEM = (
    "DDP's join() is active. A rank that has run out of batches answers DDP's messages there, but not the loss's, and the "
    "others would wait for it. Leave join() out (with Accelerate: join_uneven_inputs), and give all ranks equally many "
    "batches, the last ones empty: GlobalBatchSampler does."
)

JOINED: list[Join] = []  # the contexts that this process is in


def join_problem() -> str | None:
    return _PROBLEM if any(context._enable for context in JOINED) else None


_enter, _leave = Join.__enter__, Join.__exit__


def _entered(self: Join) -> Any:
    JOINED.append(self)
    return _enter(self)


def _left(self: Join, *error: Any) -> Any:
    with suppress(ValueError):  # this module was imported inside of the context
        JOINED.remove(self)
    return _leave(self, *error)


Join.__enter__, Join.__exit__ = _entered, _left  # type: ignore[method-assign]  # torch tells DDP modules only of the entry
