"""Invariants of losses that compare a batch with a memory of earlier calls, and memories with mistakes that they catch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from contrastive_zoo.losses.memory_loss import MemoryLoss
from contrastive_zoo.losses.memory_queue import MemoryQueue
from contrastive_zoo.ranks.world import ONE_PROCESS, Shards
from contrastive_zoo.testing.invariant import Broken, close, first_line, invariant
from contrastive_zoo.testing.worlds import RankError, Worlds
from contrastive_zoo.wrapper.step import splitting


class Call(NamedTuple):
    """What one rank finds in one call."""

    value: Tensor
    memory: Tensor
    """The embeddings in the memory after the call, in the order of slots."""


@dataclass(frozen=True)
class MemoryTrial:
    """A loss with a memory, called several times.

    Args:
        make_loss: returns the DistributedLoss of a :class:`MemoryLoss`.
        calls: the arguments of each call on all ranks, in float64.
        stored: the index of the argument whose unit rows enter the memory.
        splits: the shard sizes of each call.
        worlds: the process groups to run on.
        damage: changes the loss into one with a mistake.
    """

    make_loss: Callable[[], Any]
    calls: Sequence[Sequence[Tensor]]
    stored: int
    splits: Sequence[Sequence[int]]
    worlds: Worlds
    damage: Callable[[Any], None] = lambda loss: None

    def called(self, *, on_one_process: bool = False) -> list[list[Call]]:
        """Return what each rank finds in each call.

        Raises:
            Broken: a rank raises.
        """
        splits = [[sum(split)] if on_one_process else list(split) for split in self.splits]
        shards = [[x.split(split) for x in rows] for rows, split in zip(self.calls, splits, strict=True)]
        each = [([[x[rank] for x in rows] for rows in shards],) for rank in range(len(splits[0]))]
        try:
            return self.worlds.run(len(each), _called, self.make_loss, self.damage, each=each)
        except RankError as error:
            raise Broken(first_line(error)) from error


def _called(
    make_loss: Callable[[], Any], damage: Callable[[Any], None], calls: Sequence[Sequence[Tensor]]
) -> list[Call]:
    loss_fn = make_loss().double()
    damage(loss_fn.loss)
    found = []
    with splitting(always=True):  # every rank would compute the whole loss of a small batch
        for rows in calls:
            value = loss_fn(*rows)
            found.append(Call(value.detach(), loss_fn.loss.queue.rows))
    return found


@invariant(catches="own rows")
def memory_same_for_every_split(trial: MemoryTrial) -> None:
    """The memory after every call, and the value of every call, are those of one process, on every rank.

    When it fails, each rank compares with other embeddings, and a checkpoint holds those of one rank.
    """
    (expected,) = trial.called(on_one_process=True)
    for rank, found in enumerate(trial.called()):
        for number, (of_rank, of_one) in enumerate(zip(found, expected, strict=True), 1):
            close(of_rank.memory, of_one.memory, f"after call {number}, the memory of rank {rank} is", "one process's")
            close(of_rank.value, of_one.value, f"in call {number}, rank {rank} returns", "one process")


@invariant(catches="stored first")
def memory_holds_earlier_calls(trial: MemoryTrial) -> None:
    """A batch is compared with the embeddings of earlier calls, and enters the memory afterwards.

    When it fails, the nearest neighbour of a sample is the sample itself, and the loss has nothing to learn from.
    """
    loss: MemoryLoss = trial.make_loss().loss.double()
    earlier = torch.empty(0, trial.calls[0][trial.stored].shape[1], dtype=torch.float64)
    expected = []
    for rows in trial.calls:
        loss.queue = MemoryQueue(loss.size, loss.embedding_size, dtype=torch.float64)
        loss.queue.enqueue(earlier)
        expected.append(loss(*rows))
        earlier = torch.cat([earlier, F.normalize(rows[trial.stored], dim=1)])[-loss.size :]
    for rank, found in enumerate(trial.called()):
        for number, (of_rank, value) in enumerate(zip(found, expected, strict=True), 1):
            close(of_rank.value, value, f"in call {number}, rank {rank} returns", "with the memory of earlier calls")


MEMORY_INVARIANTS = (memory_same_for_every_split, memory_holds_earlier_calls)
"""All invariants of a loss with a memory."""


def own_rows(loss: MemoryLoss) -> None:
    """Let each rank store its own rows only."""

    def remember(self: Any, rows: Tensor, batch: Any) -> None:
        super(type(self), self).remember(rows, replace(batch, shards={"rows": Shards((len(rows),))}, world=ONE_PROCESS))

    _override(loss, remember=remember)


def stored_first(loss: MemoryLoss) -> None:
    """Let the batch enter the memory before it is compared."""

    def compute(self: Any, batch: Any) -> Tensor:
        super(type(self), self).compute(batch)
        self.eval()  # the second time nothing is stored
        value: Tensor = super(type(self), self).compute(batch)
        self.train()
        return value

    _override(loss, compute=compute)


def _override(loss: MemoryLoss, **methods: Callable[..., Any]) -> None:
    """Let a loss, and no other of its class, have other methods."""
    loss.__class__ = type(type(loss).__name__, (type(loss),), methods)


MISTAKES: dict[str, Callable[[MemoryLoss], None]] = {"own rows": own_rows, "stored first": stored_first}
"""By the name that invariants use."""
