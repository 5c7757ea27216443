"""Proof that a loss is the same function on W processes as on one: worlds, global batches, invariants, audits."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Import the audit when it is first asked for: it imports modules of this package."""
    if name != "audit":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.auditing.launch").audit
