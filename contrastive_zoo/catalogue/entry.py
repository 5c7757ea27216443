"""One loss of the catalogue, and what its docstring says."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import contrastive_zoo

_INPUTS = {"views": "view1, view2", "labels": "embeddings, labels"}


@dataclass(frozen=True)
class Entry:
    """A loss of the catalogue.

    Args:
        name: name on the command line.
        cls: name of its class in :mod:`contrastive_zoo`.
        call: ``"views"`` for ``loss(view1, view2)``, ``"labels"`` for ``loss(embeddings, labels)``, ``"other"``.
        family: the heading under which the page lists it.
        engine: the engine that computes it; GEMM counts are forward + backward, in units of one N × d × N matmul.
        settings: constructor arguments for a check.
        inputs: argument names, if they differ from those that ``call`` implies.
        peers: names of the same formula in other libraries.
    """

    name: str
    cls: str
    call: Literal["views", "labels", "other"]
    family: str
    engine: str
    settings: tuple[tuple[str, Any], ...] = ()
    inputs: str = ""
    peers: str = ""

    def make(self) -> Any:
        """Construct the loss with these settings."""
        return getattr(contrastive_zoo, self.cls)(**dict(self.settings))

    @cached_property
    def _doc(self) -> str:
        cls = getattr(contrastive_zoo, self.cls)
        function: Callable[..., Any] = getattr(cls, "function", cls)
        return inspect.getdoc(function) or ""

    @property
    def called_with(self) -> str:
        """Return the argument names of a call."""
        return self.inputs or _INPUTS[self.call]

    @property
    def summary(self) -> str:
        """Return the first line of the loss's docstring."""
        return re.sub(r":\w+:`(\w+)`", r"\1", self._doc.partition("\n")[0])

    @property
    def parameters(self) -> str:
        """Return the constructor's parameters with their default values."""
        found = inspect.signature(getattr(contrastive_zoo, self.cls)).parameters.values()
        given = [x for x in found if x.name != "check_finite" and x.kind is not x.VAR_KEYWORD]
        return ", ".join(x.name if x.default is x.empty else f"{x.name}={x.default!r}" for x in given)

    @property
    def formula(self) -> str:
        """Return the formula: the indented lines of the docstring before its sections."""
        lines = self._doc.partition("\n")[2].partition("\nArgs:")[0].split("\n")
        return "\n".join(line[4:] for line in lines if line.startswith("    ")).strip("\n")

    @property
    def source(self) -> str:
        """Return the citation."""
        return " ".join(self._doc.partition("Source:")[2].split())
