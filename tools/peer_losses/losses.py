"""The table: every loss of another library that is compared, how it is made, and what it takes."""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tools.comparison import Batch, Compared, Run, Wrap
from tools.peer_losses import arguments
from tools.peer_losses.arguments import CLASSES, WIDTH, Argument, Samples
from tools.peer_losses.packages import loaded


class Reading(nn.Module):
    """A stand-in for a model, which returns embeddings that are already computed."""

    skiplist: tuple[int, ...] = ()
    do_query_expansion = False
    device = torch.device("cpu")

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return features


def uniform(mean_anchor_probs: Tensor) -> Tensor:
    return torch.full_like(mean_anchor_probs, 1 / len(mean_anchor_probs))


IN_FLOAT32 = {"iBOTPatchLoss", "DINOv1Loss"}
"""Losses that convert embeddings to float32, whose gradients are rounded there."""


@dataclass(frozen=True)
class PeerLoss:
    """A loss of another library.

    Args:
        package: as the registry calls it.
        module: where the loss is.
        name: of the class or the function.
        takes: the arguments of a call by name.
        settings: of the constructor, or of the function.
    """

    package: str
    module: str
    name: str
    takes: Mapping[str, Argument]
    settings: Mapping[str, Any] = field(default_factory=dict)

    width = WIDTH

    def __str__(self) -> str:
        texts = {name: getattr(x, "__name__", repr(x)) for name, x in self.settings.items() if name != "model"}
        settings = ", ".join(f"{name}={text}" for name, text in texts.items())
        return self.name if self.name.endswith("_func") else f"{self.name}({settings})"

    @property
    def call(self) -> str:
        return ", ".join(f"{name}: {argument.name}" for name, argument in self.takes.items())

    def construct(self) -> Callable[..., Any]:
        torch.manual_seed(0)
        found: Any = getattr(loaded(self.module), self.name)
        if inspect.isclass(found):
            loss: Any = found(**self.settings)
            return loss.double()
        return found

    def start(self, wrap: Wrap | None, **options: Any) -> tuple[nn.Module, Callable[[Batch], Any]]:
        loss = self.construct()
        loss_fn = loss if wrap is None else wrap(loss, **options, **self.options)
        numbers = {"scale": torch.tensor(2.0), "bias": torch.tensor(-1.0)}
        numbers["prototypes"] = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(9))
        model = nn.ParameterDict({x.parameter: numbers[x.parameter] for x in self.takes.values() if x.parameter})
        learnt = nn.ModuleDict({"model": model})
        if isinstance(loss, nn.Module):
            learnt["loss"] = loss

        def of_batch(batch: Batch) -> Any:
            samples = Samples(**vars(batch), numbers=dict(model.items()))
            return loss_fn(**{name: x.value(samples, view) for view, (name, x) in enumerate(self.takes.items())})

        return learnt, of_batch

    @property
    def tolerance(self) -> float:
        """Return the largest allowed difference, relative to the larger of 1 and the largest expected element."""
        return 1e-6 if self.name in IN_FLOAT32 else 1e-10

    def wrong(self, compared: Compared) -> str | None:
        """Return in words what differs, or the error of all ranks; None if nothing does."""
        return compared.wrong(self.tolerance) or compared.unsupported

    @property
    def options(self) -> dict[str, Any]:
        names = {role: [x for x, of in self.takes.items() if of.role == role] for role in ("shared", "batch_dim")}
        options = {"shared": set(names["shared"]), "batch_dim": dict.fromkeys(names["batch_dim"], 1)}
        return {name: x for name, x in options.items() if x}


STAND_INS = {"Reading": Reading(), "uniform": uniform}


def table() -> list[PeerLoss]:
    packages = json.loads(Path(__file__).with_name("losses.json").read_text(encoding="utf-8"))
    return [_peer(package, **row) for package, rows in packages.items() for row in rows]


def _peer(package: str, module: str, name: str, takes: dict[str, str], **of: dict[str, Any]) -> PeerLoss:
    named = {key: STAND_INS.get(x, x) if isinstance(x, str) else x for key, x in of.get("settings", {}).items()}
    values = {key: tuple(x) if isinstance(x, list) else x for key, x in named.items()}
    return PeerLoss(package, module, name, {key: getattr(arguments, x) for key, x in takes.items()}, values)


STEPS = (((3, 9), (12, 0), (5, 3)), ((5, 0, 7), (1, 8, 3), (0, 6, 2)))
"""Samples of each rank at each step: uneven, and with empty ranks."""


def runs(_: PeerLoss) -> list[Run]:
    """Return the runs of every loss, under trainers that average and that sum."""
    return [Run(steps, grad_reduction) for steps in STEPS for grad_reduction in ("mean", "sum")]
