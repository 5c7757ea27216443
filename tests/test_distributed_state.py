"""A loss from elsewhere that remembers: after every step each rank holds the bytes that one process holds."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import local_shard, numbers

N, D, CLASSES, STEPS = 7, 3, 3, 4
LABELS = torch.tensor([0, 1, 0, 2, 1, 2, 0])
SPLITS = [(3, 4), (7, 0), (1, 4, 2), (0, 5, 2)]


class Centre(nn.Module):
    """An exponential mean of the rows, and a count of the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(D, dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        loss = (embeddings - self.centre).square().sum(1).mean()
        self.centre.mul_(0.9).add_(embeddings.detach().mean(0), alpha=0.1)
        self.steps.add_(1)
        return loss


class Queue(nn.Module):
    """The last rows in a ring, with a pointer."""

    def __init__(self, size: int = 10) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(size, D, dtype=torch.float64))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        loss = (embeddings @ self.rows.clone().T).exp().mean()
        slots = (self.pointer + torch.arange(len(embeddings))) % len(self.rows)
        self.rows[slots] = embeddings.detach()
        self.pointer.add_(len(embeddings))
        return loss


class ClassMeans(nn.Module):
    """A mean of every class; rows are drawn at random, and forgotten so."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("means", torch.zeros(CLASSES, D, dtype=torch.float64))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        loss = (embeddings - self.means[labels]).abs().mean()
        kept = torch.rand(len(embeddings)) < 0.7
        for label in range(CLASSES):
            of_class = embeddings.detach()[kept & (labels == label)]
            if len(of_class):
                self.means[label] = 0.5 * self.means[label] + 0.5 * of_class.mean(0)
        return loss


def trained(loss: nn.Module, wrapped: Callable[..., Tensor], part: Callable[[Tensor], Tensor]) -> list[list[Tensor]]:
    """The loss's state after every step."""
    states = []
    for step in range(STEPS):
        wrapped(part(numbers(N, D, seed=step)).requires_grad_(), part(LABELS)).backward()
        states.append([x.clone() for x in loss.buffers()])
    return states


@pytest.mark.parametrize("shards", SPLITS, ids=str)
@pytest.mark.parametrize("make", [Centre, Queue, ClassMeans])
def test_state_is_the_same_to_the_byte(make: type[nn.Module], shards: Sequence[int], worlds: Worlds) -> None:
    def job() -> list[list[Tensor]]:
        torch.manual_seed(torch.distributed.get_rank())
        loss = make()
        return trained(loss, cz.DistributedLoss(loss), lambda x: local_shard(x, shards))

    def alone() -> list[list[Tensor]]:
        torch.manual_seed(0)
        loss = make()
        return trained(loss, loss, lambda x: x)

    (expected,) = worlds.run(1, alone)
    assert all(not torch.equal(a, b) for a, b in zip(expected[0], expected[-1], strict=True))
    for by_rank in worlds.run(len(shards), job):
        for found, wanted in zip(by_rank, expected, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize("make", [Centre, Queue, ClassMeans])
def test_state_of_a_rank_by_itself_is_another(make: type[nn.Module], worlds: Worlds) -> None:
    """Or the comparison could not fail."""

    def job() -> list[list[Tensor]]:
        loss = make()
        return trained(loss, loss, lambda x: local_shard(x, (3, 4)))

    first, second = worlds.run(2, job)
    assert not all(torch.equal(x, y) for x, y in zip(first[-1], second[-1], strict=True))
