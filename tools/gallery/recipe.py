"""Parts of the gallery's recipes: the registry, two dense losses, and functions of gathered tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from contrastive_zoo.ranks.world import World
from contrastive_zoo.testing.measurement import Call, Case, GradReduction

_LINES = Path(__file__).with_name("recipes.md").read_text(encoding="utf-8").splitlines()[2:]
ABOUT = dict(line.strip("| ").split(" | ") for line in _LINES)
"""What people write, by name of the recipe, in one line."""


@dataclass(frozen=True)
class Recipe:
    """An implementation of a loss for several processes."""

    name: str
    make: Callable[[], Any]
    mistake: str | None  # key of the diagnosis; None if the contract holds
    call: Call
    grad_reduction: GradReduction
    about: str
    library: str = ""  # another library that it needs, by the name under which it is imported
    views: int = 2

    @property
    def case(self) -> Case:
        return Case(partial(make, self.name), self.call, self.grad_reduction, self.views, self.name)


GALLERY: dict[str, Recipe] = {}

PEERS: dict[str, Recipe] = {}
"""Implementations of other libraries by name."""

T = TypeVar("T", bound=Callable[..., Any])


def make(name: str) -> Any:
    return (GALLERY | PEERS)[name].make()


def recipe(
    name: str,
    *,
    mistake: str | None = None,
    call: Call = "views",
    grad_reduction: GradReduction = "mean",
    is_loss: bool = False,
    library: str = "",
    views: int = 2,
) -> Callable[[T], T]:
    """Register a function in the gallery: it is the loss, or it returns the loss."""

    def register(function: T) -> T:
        make = (lambda: function) if is_loss else function
        recipes = PEERS if library else GALLERY
        recipes[name] = Recipe(name, make, mistake, call, grad_reduction, ABOUT[name], library, views)
        return function

    return register


loss_recipe = partial(recipe, is_loss=True)


class DenseInfoNCE(nn.Module):
    """Dense InfoNCE in both directions of what ``gather`` returns for each view, times ``factor()``."""

    def __init__(self, gather: Callable[[Tensor], Tensor] = lambda x: x, factor: Callable[[], float] = lambda: 1.0):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.gather, self.factor = gather, factor

    def forward(self, view1: Tensor, view2: Tensor) -> Tensor:
        a, b = (self.gather(F.normalize(view, dim=1)) for view in (view1, view2))
        return self.factor() * symmetric_cross_entropy(self.scale * a @ b.T)


def symmetric_cross_entropy(logits: Tensor) -> Tensor:
    """Return the mean cross-entropy of the rows and columns of logits [n, n], with the positives on the diagonal."""
    positive = torch.arange(len(logits))
    return (F.cross_entropy(logits, positive) + F.cross_entropy(logits.T, positive)) / 2


def dense_sup_con(z: Tensor, labels: Tensor) -> Tensor:
    self_pair = torch.eye(len(z), dtype=torch.bool)
    positive = (labels[:, None] == labels) & ~self_pair
    log_p = F.log_softmax((F.normalize(z, dim=1) @ F.normalize(z, dim=1).T).masked_fill(self_pair, -torch.inf), 1)
    counts = positive.sum(1)
    losses = -(log_p.where(positive, 0)).sum(1) / counts.clamp(min=1)
    return losses.sum() / (counts > 0).sum().clamp(min=1)


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the world size: (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def world_size() -> int:
    return rank_and_size()[1]


def shard_sizes(x: Tensor) -> list[int]:
    return list(World.of().shards(len(x)).sizes)


def gather_detached(x: Tensor) -> list[Tensor]:
    """Return the shards of all ranks without gradient. They are padded for the gather, so uneven shards are accepted."""
    if world_size() == 1:
        return [x.detach()]
    sizes = shard_sizes(x)
    padded = torch.cat([x.detach(), x.new_zeros(max(sizes) - len(x), *x.shape[1:])])
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded)
    return [shard[:size] for shard, size in zip(gathered, sizes, strict=True)]


def scale_gradient(factor: float, x: Tensor) -> Tensor:
    return x + (factor - 1) * (x - x.detach())
