"""An extension of griffe, which reads the package for the reference: a loss's stub has its whole docstring."""

from pathlib import Path
from typing import Any

import griffe


class StubDocstrings(griffe.Extension):
    """A class that is declared with its function adds to the function's docstring; the stub holds both."""

    def on_class_instance(self, *, node: Any, cls: griffe.Class, **_: Any) -> None:
        declared_with = {x.arg for x in getattr(node, "keywords", ())}
        if "function" in declared_with and Path(str(cls.filepath)).with_suffix(".pyi").exists():
            cls.docstring = None
