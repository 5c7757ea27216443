"""An extension of griffe, which reads the package for the reference: the constructor of a loss takes its fields."""

import importlib
import inspect
from typing import Any

import griffe

from contrastive_zoo.loss_base.settings import Settings
from contrastive_zoo.testing.catalogue import default_text


class LossSignatures(griffe.Extension):
    """A class whose annotated attributes are its settings gets a constructor with these arguments."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        for module in _modules(pkg):
            for cls in (x for x in module.members.values() if isinstance(x, griffe.Class)):
                kind = getattr(importlib.import_module(module.path), cls.name, None)
                if isinstance(kind, type) and issubclass(kind, Settings) and "__init__" not in cls.members:
                    cls.set_member("__init__", _constructor(cls, kind))


def _modules(module: griffe.Module) -> list[griffe.Module]:
    """Return a module and all modules in it that define losses."""
    inside = [x for x in module.members.values() if isinstance(x, griffe.Module)]
    found = [module, *(y for x in inside if x.name not in _OPTIONAL for y in _modules(x))]
    return [x for x in found if not x.is_namespace_package]


_OPTIONAL = {"adapters", "audit", "cli", "demo", "kernels", "testing", "__main__"}
"""Parts that define no public losses, and need optional libraries."""


def _constructor(cls: griffe.Class, loss: type[Settings]) -> griffe.Function:
    kinds = griffe.ParameterKind
    parameters = [griffe.Parameter("self", kind=kinds.positional_or_keyword)]
    for name, of_field in loss.fields.items():
        if of_field.init:
            declared = next(
                x.members[name] for x in (cls, *cls.mro()) if getattr(x.members.get(name), "annotation", None)
            )
            default = of_field.value()
            text = None if default is inspect.Parameter.empty else default_text(default)
            kind = kinds.keyword_only if of_field.kw_only else kinds.positional_or_keyword
            parameters.append(griffe.Parameter(name, annotation=declared.annotation, kind=kind, default=text))
    return griffe.Function("__init__", parameters=griffe.Parameters(*parameters))
