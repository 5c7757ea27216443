"""Several ranks that send from an accelerator, as NCCL does: the losses are right, and a steady step can be captured.

A CUDA graph records what a step starts on the device. A value that the host reads, memory that it pins and a tensor of the
device that is sent by the CPU would break the recording; the handshake, numbers of the host, does not.
"""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.trial import whole_batch
from contrastive_zoo.testing.worlds import Worlds
from contrastive_zoo.world import World
from tests.helpers import EVERY_CASE
from tests.test_accelerator import may_read
from tests.test_contract import WHOLE_ZOO
from tests.test_devices import LEFT_OUT, device, on_cpu, put_by, value_and_gradients
from tests.zoo import Entry

SHARDS = (4, 4)
STATEFUL = {"NNCLR", "ReSSL"}
"""They read how many rows their memory holds."""

HANDSHAKE = 2 * 8 * 64
"""Bytes that are more than the headers of two ranks."""


@pytest.fixture(scope="module")
def accelerated() -> Iterator[Worlds]:
    """Worlds whose backend sends from the simulated device only."""

    def pretend() -> None:
        World.on_accelerators = property(lambda world: world.size > 1)  # type: ignore[assignment]  # a cached property
        World.device = property(lambda world: torch.device("ipu:0"))  # type: ignore[assignment]  # a cached property

    with Worlds() as pool:
        pool.run(2, pretend)
        yield pool


class Steps:
    """Three steps of one rank: results, and what the last of them read and sent from the host."""

    def __init__(self, entry: Entry, rows: list[Tensor], **options: Any) -> None:
        loss = entry.case(temperature=0.3).make()
        loss = cz.DistributedLoss(loss.loss, static_shapes=True, **options).double()
        with device() as mode:
            put = put_by(mode)
            moved = [put(x) for x in rows]
            loss, self.found = put(loss), []
            for _ in range(3):
                mode.reads.clear()
                mode.host_messages.clear()
                on_device = value_and_gradients(loss, moved)
                self.reads, self.host_messages = list(mode.reads), list(mode.host_messages)
                self.found.append(on_cpu(on_device))


def steps(index: int, *rows: Tensor, check: bool) -> tuple[list[Any], list[str], list[int]]:
    done = Steps(ENTRIES[index], list(rows), check_finite=check, check_equal=check)
    return done.found, done.reads, done.host_messages


def is_of_this_library(loss: torch.nn.Module) -> bool:
    """Other losses may draw: every rank sends the state of its generators."""
    own = [type(x).__module__.startswith("contrastive_zoo.") for x in loss.loss.modules()]
    return all(own)


ENTRIES = [entry for entry in WHOLE_ZOO if str(entry) not in LEFT_OUT]
DRAWN = ENTRIES[:: 1 if EVERY_CASE else 3]


@pytest.mark.parametrize("entry", DRAWN, ids=str)
def test_a_steady_step_can_be_captured(entry: Entry, accelerated: Worlds) -> None:
    rows = whole_batch(entry.case(), GlobalBatch(SHARDS, d=3, labels="mixed", seed=5))
    loss = copy.deepcopy(entry.case(temperature=0.3).make()).double()
    expected = [value_and_gradients(loss, rows) for _ in range(3)]
    each = list(zip(*(x.split(SHARDS) for x in rows), strict=True))
    for rank, (found, reads, sent) in enumerate(
        accelerated.run(2, steps, ENTRIES.index(entry), each=each, check=False)
    ):
        local = slice(rank * SHARDS[0], (rank + 1) * SHARDS[0])
        for step, whole in zip(found, expected, strict=True):
            count = sum(x.is_floating_point() for x in rows)
            parts = [whole[0], *(2 * x[local] for x in whole[1 : 1 + count]), *whole[1 + count :]]
            torch.testing.assert_close(step, [x.detach() for x in parts], rtol=1e-9, atol=1e-10)
        if not may_read(str(entry)) and str(entry) not in STATEFUL and is_of_this_library(loss):
            assert not reads
        assert sum(sent) <= HANDSHAKE, "the host sends headers only"


def test_checks_would_be_noticed(accelerated: Worlds) -> None:
    """The mutant: a step that pins memory and reads values, as checks of NaN and of equal values do."""
    entry = next(x for x in ENTRIES if str(x) == "NTXent")
    rows = whole_batch(entry.case(), GlobalBatch(SHARDS, d=3))
    each = list(zip(*(x.split(SHARDS) for x in rows), strict=True))
    for _, reads, _ in accelerated.run(2, steps, ENTRIES.index(entry), each=each, check=True):
        assert reads


def test_a_message_of_the_host_would_be_noticed(accelerated: Worlds) -> None:
    def job() -> list[int]:
        with device() as mode:
            dist.all_reduce(torch.ones(1000))
            return mode.host_messages

    assert all(sum(sent) > HANDSHAKE for sent in accelerated.run(2, job))
