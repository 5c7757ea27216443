"""An extension of griffe, which reads the package for the reference: the constructor of a loss takes its fields."""

import importlib
import inspect
from typing import Any

import griffe
from torch import nn

from contrastive_zoo.loss_base.settings import Settings

ROOMS = ("contrastive_zoo.loss_base.", "contrastive_zoo.losses.")


class LossSignatures(griffe.Extension):
    """A class whose annotated attributes are its settings gets the constructor that it has at run time."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        if cls.module.path.startswith(ROOMS) and "__init__" not in cls.members:
            kind = getattr(importlib.import_module(cls.module.path), cls.name, None)
            if isinstance(kind, type) and issubclass(kind, Settings):
                taken = inspect.signature(kind.__init__).parameters.values()
                cls.set_member(
                    "__init__", griffe.Function("__init__", parameters=griffe.Parameters(*map(_shown, taken)))
                )


def _shown(x: inspect.Parameter) -> griffe.Parameter:
    default: str | None = None if x.default is x.empty else repr(x.default)
    if isinstance(x.default, nn.Parameter):
        default = f"Parameter({x.default.tolist()})"
    annotation = None if x.annotation is x.empty else inspect.formatannotation(x.annotation)
    return griffe.Parameter(
        x.name, kind=griffe.ParameterKind(x.kind.description), default=default, annotation=annotation
    )
