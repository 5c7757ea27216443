"""Any contrastive or metric-learning loss, the same function on W processes as on one.

loss_fn = contrastive_zoo.DistributedLoss(contrastive_zoo.NTXent(temperature=0.1))
loss = loss_fn(view1, view2)      # this rank's rows; value and gradients are those of all ranks' rows
"""

import ast
import importlib
import pkgutil

__version__ = "0.1.0"

_HOMES = {  # the table that type checkers read, too
    imported.name: line.module
    for line in ast.parse(pkgutil.get_data(__name__, "__init__.pyi") or b"").body
    if isinstance(line, ast.ImportFrom) and line.module
    for imported in line.names
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> object:
    """Public names are imported when first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    if home in (__name__, f"{__name__}.ranks"):  # a room, or the module of collectives
        value = importlib.import_module(f"{home}.{name}")
    else:
        value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
