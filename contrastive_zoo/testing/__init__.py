"""Proof that a loss is the same function on W processes as on one: worlds, global batches, invariants, audits."""

from importlib import import_module
from typing import Any

_AUDITS = ("audit", "OnlineAudit")


def __getattr__(name: str) -> Any:
    """Import an audit when it is first asked for: it imports modules of this package."""
    if name not in _AUDITS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.auditing.running"), name)
