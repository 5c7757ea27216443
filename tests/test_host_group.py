"""The group by which ranks with accelerators agree: its time-out, an interface that is not there, and what is compared."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import contrastive_zoo as cz
from contrastive_zoo.ranks.compat import waiting_time
from contrastive_zoo.ranks.messages import CommunicationError
from contrastive_zoo.ranks.world import World
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import error_message, numbers
from tests.simulated import device


def test_it_has_the_time_out_of_the_users_group() -> None:
    def job() -> float:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(World, "on_accelerators", True)
            group = World.of(dist.new_group(timeout=timedelta(seconds=37)))._host_group
            assert group is not None
            return waiting_time(group)

    with Worlds() as worlds:  # in a pool of all tests, the name of the group may have been taken and given up
        assert worlds.run(2, job) == [37.0, 37.0]


def test_an_error_names_the_variable_where_gloo_cannot_connect() -> None:
    def job() -> str | None:
        world = World.of(dist.new_group(), "NTXent, call 1")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(World, "on_accelerators", True)
            patch.setitem(os.environ, "GLOO_SOCKET_IFNAME", "nowhere0")
            with pytest.raises(CommunicationError) as error:
                world.exchange([1])
        return str(error.value)

    with Worlds() as worlds:  # the name of a group that was not made is taken in its processes
        errors = worlds.run(2, job)
    for rank, found in enumerate(errors):
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
