"""Ranks on two hosts: the contract holds, and a link that is cut ends as an error on both."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from contrastive_zoo.testing.worlds import Worlds
from tests import faults, hosts
from tests.random_steps.rank import play

SHARDS = [(3, 0, 2, 4), (1, 5, 0, 0), (2, 2, 2, 2), (0, 0, 0, 3), (4, 1, 3, 0)]


@pytest.fixture
def both() -> Iterator[tuple[hosts.Host, hosts.Host]]:
    try:
        with hosts.two_hosts():
            pass
    except OSError as error:
        pytest.skip(f"TWO HOSTS ARE NOT TESTED. They need Linux, root, ip, nsenter and unshare: {error}")
    with hosts.two_hosts() as pair:
        yield pair


def contract(host: hosts.Host, store: Path) -> list[str]:
    """Compare losses with one process over several steps with uneven and empty shards; a difference is an error."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    host.enter()
    os.environ["GLOO_SOCKET_IFNAME"] = hosts.INTERFACE
    dist.init_process_group("gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size)
    steps = [("step", {"batches": [sizes]}) for sizes in SHARDS]
    in_a_ring = [("set_option", {"ring": True}), *steps]
    for name, program in {"Clip": [*steps, *in_a_ring], "Triplet": steps}.items():
        for small_batch in (2**28, -1):
            play(name, {"contrastive_zoo.engine.plan:SMALL_BATCH": small_batch}, program)
    return [os.readlink("/proc/thread-self/ns/net"), os.readlink("/proc/self/ns/net")]


def test_losses_are_those_of_one_process(both: tuple[hosts.Host, hosts.Host], tmp_path: Path) -> None:
    with Worlds(timeout=300.0) as worlds:
        each = [(both[rank // 2], tmp_path / "store") for rank in range(4)]
        found = worlds.run(4, contract, each=each)
    places = [os.readlink(host.namespace) for host in both for _ in range(2)]
    assert [x for x, _ in found] == places
    assert len({*places, os.readlink("/proc/self/ns/net")}) == 3


@pytest.mark.usefixtures("both")
def test_a_link_that_is_cut_is_an_error_on_both_hosts() -> None:
    outcomes = faults.run_fault(faults.LINK_CUT, world_size=4)
    assert len(outcomes) == 4
    for rank, outcome in enumerate(outcomes):
        assert outcome.kind == "CommunicationError", outcome
        assert f"rank {rank} " in outcome.text
        assert outcome.ended, "an orphan"
