"""Largest errors in float64 of open_clip's and lightly's losses under DistributedLoss, against one process.

python benchmarks/recipes.py

Needs the two libraries, not what they depend on (pip install --no-deps open_clip_torch lightly): each loss is read from
its file, past the packages' imports of torchvision.
"""

import importlib
import sys
import types
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from contract import errors
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.testing.trial import Case
from contrastive_zoo.testing.worlds import Worlds


def module(name: str) -> Any:
    """Import a module without the ``__init__`` of its packages."""
    package = name.partition(".")[0]
    if package not in sys.modules:
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit(f"{package} is not installed: pip install --no-deps open_clip_torch lightly")
        root = Path(next(iter(spec.submodule_search_locations)))
        for path in (root, *(x for x in root.rglob("*") if x.is_dir() and x.name.isidentifier())):
            hollow = types.ModuleType(".".join((package, *path.relative_to(root).parts)))
            hollow.__path__ = [str(path)]
            sys.modules[hollow.__name__] = hollow
    return importlib.import_module(name)


class WithScale(nn.Module):
    """Hold the parameters of open_clip's model and call its losses with them."""

    def __init__(self, loss: Callable[..., Tensor], *, bias: bool) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(1.5))
        self.bias = nn.Parameter(torch.tensor(-2.0)) if bias else None
        self.loss = loss

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        scales = [self.log_scale.exp()] + ([] if self.bias is None else [self.bias])
        return self.loss(*(nn.functional.normalize(x, dim=1) for x in (image, text)), *scales)


def ntxent(trainer: str) -> Any:
    """Construct lightly's loss without its own gather."""
    if (
        "torchvision" not in sys.modules and find_spec("torchvision") is None
    ):  # of which one class is imported and none used
        hollow = types.ModuleType("torchvision.ops")
        hollow.StochasticDepth = nn.Identity
        sys.modules |= {"torchvision": types.ModuleType("torchvision"), hollow.__name__: hollow}
    loss = module("lightly.loss.ntx_ent_loss").NTXentLoss(gather_distributed=False)
    return cz.DistributedLoss(loss, grad_reduction=trainer)


def open_clip(name: str, trainer: str) -> Any:
    """Construct open_clip's loss for one process."""
    loss = cz.DistributedLoss(getattr(module("open_clip.loss"), name)(), grad_reduction=trainer)
    return WithScale(loss, bias=name == "SigLipLoss")


def main() -> None:
    """Print a row for each loss and trainer."""
    table = Table("loss", "trainer", "value", "encoder gradient", "parameter gradient", box=None)
    makers = {
        "open_clip ClipLoss": partial(open_clip, "ClipLoss"),
        "open_clip SigLipLoss": partial(open_clip, "SigLipLoss"),
        "lightly NTXentLoss": ntxent,
    }
    with Worlds() as worlds:
        for name, make in makers.items():
            for trainer in ("mean", "sum"):
                case = Case(partial(make, trainer), call="views", grad_reduction=trainer, name=name)
                table.add_row(name, trainer, *(f"{error:.1e}" for error in errors(case, worlds)))
    Console().print(table)


if __name__ == "__main__":
    main()
