"""Parts of the gallery's recipes: the registry, two dense formulas, and plain messages between ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from contrastive_zoo.testing.measurement import Call, Case, GradReduction
from contrastive_zoo.world import World


@dataclass(frozen=True)
class Recipe:
    """One way to write a loss for several processes.

    Args:
        name: its name in reports.
        make: returns the loss.
        mistake: key of the diagnosis; None if the contract holds.
        call: with views or with labels.
        trainer: how the trainer reduces gradients.
        about: what people write, in a line.
    """

    name: str
    make: Callable[[], Any]
    mistake: str | None
    call: Call
    trainer: GradReduction
    about: str

    @property
    def case(self) -> Case:
        """The recipe as a case under test."""
        return Case(partial(make, self.name), call=self.call, grad_reduction=self.trainer, name=self.name)


GALLERY: dict[str, Recipe] = {}
"""All recipes by name."""


def make(name: str) -> Any:
    """The loss of a recipe."""
    import contrastive_zoo.testing.gallery  # noqa: F401 - a rank that gets the name only has none of them yet

    return GALLERY[name].make()


def recipe(
    name: str, *, mistake: str | None, call: Call = "views", trainer: GradReduction = "mean"
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a recipe in the gallery; its docstring says what people write."""

    def register(make: Callable[[], Any]) -> Callable[[], Any]:
        GALLERY[name] = Recipe(name, make, mistake, call, trainer, (make.__doc__ or "").strip())
        return make

    return register


# ------------------------------------------------------------------------------------------------- two dense formulas


class Pairs(nn.Module):
    """InfoNCE in both directions, dense; ``gathered`` says how the ranks' rows come together."""

    def __init__(self, gathered: Callable[[Tensor], Tensor] = lambda x: x, factor: Callable[[], float] = lambda: 1.0):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.gathered, self.factor = gathered, factor

    def forward(self, view1: Tensor, view2: Tensor) -> Tensor:
        a, b = (self.gathered(F.normalize(view, dim=1)) for view in (view1, view2))
        return self.factor() * two_way(self.scale * a @ b.T)


def two_way(logits: Tensor, start: int = 0) -> Tensor:
    """Mean over rows of a square of logits, in both directions; the partner of row i is column i + start."""
    partner = torch.arange(start, start + len(logits))
    return (F.cross_entropy(logits, partner) + F.cross_entropy(logits.T, partner)) / 2


def supervised(z: Tensor, labels: Tensor) -> Tensor:
    """SupCon of these rows, dense."""
    own = torch.eye(len(z), dtype=torch.bool)
    positive = (labels[:, None] == labels) & ~own
    log_p = F.log_softmax((F.normalize(z, dim=1) @ F.normalize(z, dim=1).T).masked_fill(own, -torch.inf), 1)
    counts = positive.sum(1)
    losses = -(log_p.where(positive, 0)).sum(1) / counts.clamp(min=1)
    return losses.sum() / (counts > 0).sum().clamp(min=1)


def ranks() -> tuple[int, int]:
    """This process's rank and how many there are; 0 of 1 without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def sizes(x: Tensor) -> list[int]:
    """All ranks' number of rows."""
    return list(World.of().shards(len(x)).sizes)


def parts(x: Tensor) -> list[Tensor]:
    """All ranks' rows by rank, without gradient; padded for the gather, so that recipes accept uneven shards."""
    if ranks()[1] == 1:
        return [x.detach()]
    counts = sizes(x)
    padded = torch.cat([x.detach(), x.new_zeros(max(counts) - len(x), *x.shape[1:])])
    found = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(found, padded)
    return [y[:count] for y, count in zip(found, counts, strict=True)]


def times(factor: float, x: Tensor) -> Tensor:
    """x with ``factor`` times its gradient."""
    return x + (factor - 1) * (x - x.detach())
