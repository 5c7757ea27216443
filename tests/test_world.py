"""The groups and gathers of a world: gathers of many ranks in ⌈log₂ W⌉ rounds, and the group that sends from the host."""

import os
import time
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.ranks import world as world_module
from contrastive_zoo.ranks.compat import waiting_time
from contrastive_zoo.ranks.doubling import Doubling
from contrastive_zoo.ranks.messages import CommunicationError
from contrastive_zoo.ranks.world import World
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import distance, error_message, numbers
from tests.simulated import device, value_and_gradients


def of_many_ranks() -> AbstractContextManager[None]:
    """Within it this rank's group, however small, gathers as a group of many ranks does."""
    return patch.object(world_module, "FEW_RANKS", 0)


def gathered(*, one_tag: bool) -> bool:
    """Whether two gathers that are under way at a time bring the rows of all ranks."""
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


def test_the_host_group_has_the_time_out_of_the_users_group() -> None:
    def job() -> float:
        with patch.object(World, "on_accelerators", True):
            group = World.of(dist.new_group(timeout=timedelta(seconds=37)))._host_group
            assert group is not None
            return waiting_time(group)

    with Worlds() as worlds:  # in a pool of all tests, the name of the group may have been taken and given up
        assert worlds.run(2, job) == [37.0, 37.0]


def test_an_error_names_the_variable_where_gloo_cannot_connect() -> None:
    def job() -> str | None:
        world = World.of(dist.new_group(), "NTXent, call 1")
        nowhere = patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "nowhere0"})
        with patch.object(World, "on_accelerators", True), nowhere:
            return error_message(lambda: world.exchange([1]), CommunicationError)

    with Worlds() as worlds:  # the name of a group that was not made is taken in its processes
        errors = worlds.run(2, job)
    for rank, found in enumerate(map(str, errors)):
        assert found.startswith(f"NTXent, call 1: rank {rank}: ranks that compute on accelerators agree through gloo")
        assert "Set GLOO_SOCKET_IFNAME to a network interface" in found
        assert "nowhere0" in found


def refused(*, differs: bool) -> str | None:
    """What a rank is told where its float32 matmuls are those of the others, or on rank 1 other ones."""
    torch.set_float32_matmul_precision("high" if differs and dist.get_rank() == 1 else "highest")
    try:
        with device() as mode:
            rows = [mode.put(numbers(2, 3, seed=2 * dist.get_rank() + side, dtype=torch.float32)) for side in (0, 1)]
            return error_message(lambda: cz.DistributedLoss(cz.NTXent())(*rows))
    finally:
        torch.set_float32_matmul_precision("highest")


def test_ranks_that_multiply_float32_in_other_ways_are_refused(device_worlds: Worlds) -> None:
    for found in device_worlds.run(2, refused, differs=True):
        assert found is not None
        assert "float32 matmuls" in found
        assert "tf32" in found
    assert device_worlds.run(2, refused, differs=False) == [None, None]
