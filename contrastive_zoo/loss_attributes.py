"""The attributes of a loss, seen through the wrapper around it."""

import inspect
from typing import Any

from contrastive_zoo.loss_base.graph_operator import GraphModule
from contrastive_zoo.loss_call import without_ddp
from contrastive_zoo.wrapper_options import shown


class LossAttributes(GraphModule):
    """A wrapper of ``loss``, whose public attributes are read and set through it where it has none of that name."""

    def extra_repr(self) -> str:
        """Every option that is not its default; modules stand below."""
        parts = []
        for name, parameter in inspect.signature(type(self).__init__).parameters.items():
            value = None if name == "self" else getattr(self, name)
            if value is not parameter.default and value != parameter.default and name not in {"self", *self._modules}:
                parts.append(f"{name}={shown(value)}")
        return ", ".join(parts)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if (bare := self._has(name)) is None:
                raise
            return getattr(bare, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # a schedule that sets loss_fn.temperature means the loss's; without this it would change nothing
        own = name in vars(self) or name in vars(self).get("_modules", ()) or hasattr(type(self), name)
        bare = None if own else self._has(name)
        if bare is None:
            super().__setattr__(name, value)
        else:
            setattr(bare, name, value)

    def _has(self, name: str) -> Any:
        """The bare loss if this is one of its public attributes."""
        bare = without_ddp(vars(self).get("loss", vars(self).get("_modules", {}).get("loss")))
        return None if name.startswith("_") or not hasattr(bare, name) else bare
