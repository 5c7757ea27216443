"""Mistakes that a single step does not show: in later steps, with unequal settings, with random numbers."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from contrastive_zoo.collectives import all_gather
from contrastive_zoo.distributed import DistributedLoss
from contrastive_zoo.testing.recipe import Pairs, ranks, recipe, supervised, times

WIDEST, CLASSES = 8, 64
"""Of embeddings that sharded weights are compared with, and how many there are."""


class _Counting(nn.Module):
    """Pairs under DistributedLoss, times W from the third call on."""

    def __init__(self) -> None:
        super().__init__()
        self.loss, self.calls = DistributedLoss(Pairs()), 0

    def forward(self, view1: Tensor, view2: Tensor) -> Tensor:
        self.calls += 1
        value: Tensor = self.loss(view1, view2)
        return ranks()[1] * value if self.calls > 2 else value


@recipe("scaled from call 3", mistake="later steps")
def _() -> Any:
    """right twice, then by another path that multiplies by W"""
    return _Counting()


def _noisy(draw: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(embeddings: Tensor, labels: Tensor) -> Tensor:
        z = all_gather(embeddings)
        return supervised(z + 0.1 * draw(z), all_gather(labels))

    return loss


@recipe("own random stream", mistake="own draws", call="labels")
def _() -> Any:
    """every rank computes the whole loss and draws its noise from its own generator"""
    return _noisy(torch.rand_like)


@recipe("shared random stream", mistake=None, call="labels")
def _() -> Any:
    """the same, where what rank 0 draws is sent to all ranks"""

    def draw(z: Tensor) -> Tensor:
        noise = torch.rand_like(z)
        if ranks()[1] > 1:
            dist.broadcast(noise, 0)
        return noise

    return _noisy(draw)


class _ShardedClasses(nn.Module):
    """A classifier of which each rank keeps the weights of its share of the classes; every rank computes the whole loss."""

    sharded = True

    def __init__(self, factor: float) -> None:
        super().__init__()
        rank, size = ranks()
        whole = torch.randn(CLASSES, WIDEST, generator=torch.Generator().manual_seed(3))
        self.weight = nn.Parameter(whole.tensor_split(size)[rank])
        self.factor = factor

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        z = times(ranks()[1], all_gather(embeddings, gradient="complete"))
        weight = times(self.factor, all_gather(self.weight, gradient="complete"))
        return F.cross_entropy(z @ weight[:, : z.shape[1]].T, all_gather(labels))


@recipe("sharded weights", mistake=None, call="labels")
def _() -> Any:
    """each rank keeps the weights of its share of the classes and gets their complete gradient"""
    return _ShardedClasses(1)


@recipe("sharded weights, W×", mistake="sharded parameters", call="labels")
def _() -> Any:
    """the same, where these gradients are scaled for an average that no trainer takes of them"""
    return _ShardedClasses(ranks()[1])


class DistributedByHand(nn.Module):
    """A wrapper as people write it; ``compares`` says of what its ranks make sure that it is the same on all of them."""

    def __init__(self, loss: nn.Module, compares: Sequence[str] = ("settings", "parameters", "arguments")) -> None:
        super().__init__()
        self.loss, self.compares, self.grad_reduction = loss, compares, "mean"

    def forward(self, *rows: Tensor) -> Tensor:
        if ranks()[1] > 1:
            self._compare(rows)
        gathered = [all_gather(x, gradient="complete") for x in rows]
        value: Tensor = self.loss(*(times(ranks()[1], x) if x.is_floating_point() else x for x in gathered))
        return value

    def _compare(self, rows: Sequence[Tensor]) -> None:
        local: dict[str, Any] = {
            "settings": self.grad_reduction,
            "parameters": [x.detach().sum().item() for x in self.parameters()],
            "arguments": len(rows),
        }
        gathered: list[Any] = [None] * ranks()[1]
        dist.all_gather_object(gathered, {what: local[what] for what in self.compares})
        if any(other != gathered[0] for other in gathered):
            raise ValueError(f"ranks differ: {gathered}")


@recipe("compared by hand", mistake=None)
def _() -> Any:
    """a wrapper of one's own that compares settings, parameters and arguments before it gathers"""
    return DistributedByHand(Pairs())


@recipe("settings not compared", mistake="settings")
def _() -> Any:
    """the same, where nobody compares settings"""
    return DistributedByHand(Pairs(), ("parameters", "arguments"))


@recipe("parameters not compared", mistake="unequal parameters")
def _() -> Any:
    """the same, where nobody compares the loss's own parameters: proxies drawn from a seed per rank stay undetected"""
    return DistributedByHand(Pairs(), ("settings", "arguments"))


@recipe("arguments not compared", mistake="missing argument")
def _() -> Any:
    """the same, where nobody compares which arguments came: a rank with one less enters one gather less"""
    return DistributedByHand(Pairs(), ("settings", "parameters"))


class _OneMore(nn.Module):
    """Pairs under DistributedLoss; the last rank sends itself something."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = DistributedLoss(Pairs())

    def forward(self, view1: Tensor, view2: Tensor) -> Tensor:
        rank, size = ranks()
        if size > 1 and rank == size - 1:
            own = dist.new_group([rank], use_local_synchronization=True)
            dist.all_reduce(torch.ones(1), group=own)
            dist.destroy_process_group(own)
        value: Tensor = self.loss(view1, view2)
        return value


@recipe("one message more", mistake="messages differ")
def _() -> Any:
    """a rank takes part in one collective more than the others, here in a group of its own"""
    return _OneMore()
