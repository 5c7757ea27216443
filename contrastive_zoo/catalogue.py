"""What is in the zoo: one row per loss."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal


@dataclass(frozen=True)
class Species:
    """A loss of the zoo.

    Args:
        name: as the command line spells it.
        cls: its class in :mod:`contrastive_zoo`.
        call: ``"views"`` for ``loss(view1, view2)``, ``"labels"`` for ``loss(embeddings, labels)``.
        family: what it is a kind of.
        engine: what computes it; GEMM counts are forward + backward, in units of one N × d × N product.
        settings: what the constructor is given for a check.
    """

    name: str
    cls: str
    call: Literal["views", "labels"]
    family: str
    engine: str
    settings: tuple[tuple[str, Any], ...] = ()

    def make(self) -> Any:
        """The loss with these settings."""
        return getattr(importlib.import_module("contrastive_zoo"), self.cls)(**dict(self.settings))

    @cached_property
    def _doc(self) -> str:
        cls = getattr(importlib.import_module("contrastive_zoo"), self.cls)
        function: Callable[..., Any] = getattr(cls, "function", cls)
        return inspect.getdoc(function) or ""

    @property
    def summary(self) -> str:
        """First line of its docstring."""
        return self._doc.partition("\n")[0]

    @property
    def source(self) -> str:
        """The citation."""
        return " ".join(self._doc.partition("Source:")[2].split())


CATALOGUE = {
    species.name: species
    for species in (
        Species("nt-xent", "NTXent", "views", "softmax over pairs", "softmax, one tower: 3 GEMM"),
        Species("info-nce", "InfoNCE", "views", "softmax over pairs", "softmax, two towers: 4 GEMM"),
        Species(
            "clip", "InfoNCE", "views", "softmax over pairs", "softmax, two towers: 4 GEMM", (("symmetric", True),)
        ),
        Species("sup-con", "SupCon", "labels", "softmax over pairs", "softmax, one tower: 3 GEMM"),
    )
}
"""All losses by name."""
