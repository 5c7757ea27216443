"""The target of ``contrastive-zoo check``: a loss of the catalogue, or a function of any module that returns a loss."""

import pkgutil
from collections.abc import Callable
from typing import Any

from torch import nn
from typer import BadParameter

from contrastive_zoo.ranks.suggestions import did_you_mean
from contrastive_zoo.testing.catalogue import CATALOGUE, find_entry
from contrastive_zoo.wrapper.distributed import DistributedLoss


def find_target(target: str, settings: dict[str, Any], wrap: bool) -> tuple[Callable[[], Any], str, str | None]:
    """Return a function that constructs the loss, its name, and its call form; None outside the catalogue."""
    shown = ", ".join(f"{key}={value!r}" for key, value in settings.items())
    name = f"{target.rpartition(':')[2]}({shown})" if settings else target.rpartition(":")[2]
    entry = find_entry(target)
    factory, arguments = (_factory(target), settings) if entry is None else (entry.loss, entry.settings | settings)
    call = None if entry is None else entry.call
    if entry is not None and set(entry.kinds.values()) == {"rows"} and len(entry.kinds) <= 3:
        call = "views"
    if entry is not None and call == "other":
        raise BadParameter(
            f"{target} is called with {entry.inputs or ', '.join(entry.kinds)}. Write a function of embeddings and labels, "
            "or of one to three views, that calls it, and check that function."
        )
    if isinstance(factory, nn.Module) or not callable(factory):
        raise BadParameter(f"{target} is a {type(factory).__name__}; pass a function that returns a loss, or a class.")

    def make() -> Any:
        loss = factory(**arguments)
        return DistributedLoss(loss) if wrap or entry is not None else loss

    return make, f"DistributedLoss({name})" if wrap and entry is None else name, call


def _factory(target: str) -> Any:
    module_name, separator, _ = target.partition(":")
    if target.endswith(".py"):
        raise BadParameter(
            f"{target} is a script. A training is compared with one process by: contrastive-zoo audit {target}. "
            f"To check a loss in it: contrastive-zoo check {target.removesuffix('.py').replace('/', '.')}:make_loss."
        )
    if not separator:
        raise BadParameter(
            f"{target!r} is neither module:function nor a loss of contrastive_zoo.{did_you_mean(target, CATALOGUE)}"
        )
    try:
        return pkgutil.resolve_name(target)
    except SyntaxError as error:
        raise BadParameter(f"{target}: {error.filename}, line {error.lineno}: {error.msg}.") from None
    except AttributeError as error:
        raise BadParameter(f"{target}: {error}.{did_you_mean(error.name or '', dir(error.obj))}") from None
    except BaseException as error:  # a module may raise anything, and may call sys.exit
        raise BadParameter(f"{target}: importing {module_name} raised {type(error).__name__}: {error}") from None
