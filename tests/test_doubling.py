"""The gather of many ranks in ⌈log₂ W⌉ rounds: the same rows and losses, several at a time, failures that are told."""

import time
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.ranks import world as world_module
from contrastive_zoo.ranks.doubling import Doubling
from contrastive_zoo.ranks.messages import CommunicationError
from contrastive_zoo.ranks.world import World
from contrastive_zoo.testing.worlds import Worlds
from contrastive_zoo.wrapper.step import splitting
from tests.helpers import distance, numbers
from tests.simulated import value_and_gradients


def of_many_ranks() -> AbstractContextManager[None]:
    """Within it this rank's group, however small, gathers as a group of many ranks does."""
    return patch.object(world_module, "_FEW_RANKS", 0)


def gathered(*, one_tag: bool) -> bool:
    """Whether two gathers that are under way at a time bring the rows of all ranks.

    A rank's threads may send in any order. With one tag rank 0's do so in the other one.
    """
    world = World.of()
    all_rows = torch.arange(3.0) + 100 * torch.arange(world.size)[:, None]
    messages = [all_rows[world.rank], all_rows[world.rank] + 50]
    if one_tag:
        found, works = [torch.empty(world.size, *x.shape) for x in messages], []
        for index in (1, 0) if world.rank == 0 else (0, 1):
            works.append(Doubling(messages[index], found[index], world.process_group, 1))
            time.sleep(0.2)
        for work in works:
            work.wait()
    else:
        with of_many_ranks():
            found = [wait() for wait in [world.start_gather(x) for x in messages]]
    return torch.equal(found[0], all_rows) and torch.equal(found[1], all_rows + 50)


def test_two_gathers_at_a_time_bring_the_rows_of_all_ranks(worlds: Worlds) -> None:
    for size in (2, 3, 5):
        assert all(worlds.run(size, gathered, one_tag=False))
    assert not all(worlds.run(2, gathered, one_tag=True))  # the mutant: they would be mixed up


def step(*, many: bool) -> list[Tensor]:
    rank = dist.get_rank()
    rows = [numbers((3, 0, 2)[rank], 4, seed=10 * rank + side) for side in (0, 1)]
    with of_many_ranks() if many else nullcontext(), splitting(always=True):
        found = value_and_gradients(
            cz.DistributedLoss(cz.Clip(temperature=cz.LearnableTemperature(0.2))).double(), rows
        )
    return [x.detach() for x in found]


def test_a_loss_is_the_same(worlds: Worlds) -> None:
    for x, expected in zip(*(worlds.run(3, step, many=many) for many in (True, False)), strict=True):
        assert all(distance(a, b) < 1e-14 for a, b in zip(x, expected, strict=True))


def waits_for_a_failed_rank() -> str:
    """What rank 0 learns while it waits in the rounds of a group whose rank 1 has failed."""

    rank = dist.get_rank()

    def fails(z: Tensor) -> Tensor:
        if rank == 1:
            raise KeyError("a column is missing")
        return z.square().sum()

    loss_fn = cz.DistributedLoss(fails, process_group=dist.new_group([0, 1]))
    with of_many_ranks():
        for _ in range(2):
            try:
                loss_fn(numbers(2, 3, seed=rank))
            except (CommunicationError, KeyError) as error:
                return str(error)
    return ""


def test_a_failure_is_told_within_the_rounds(worlds: Worlds) -> None:
    found, _ = worlds.run(2, waits_for_a_failed_rank)
    assert (
        "rank 0 waited in the handshake for a rank that has failed. Rank 1 failed in fails, call 1: KeyError" in found
    )
