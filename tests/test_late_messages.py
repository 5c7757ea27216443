"""Messages that arrive when they are waited for, and not before: nothing reads or overwrites their buffers until then."""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.engine.exchange import SendReceive
from contrastive_zoo.ranks import world
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.measurement import whole_batch
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EVERY_CASE
from tests.losses.whole_zoo import WHOLE_ZOO
from tests.simulated import value_and_gradients
from tests.zoo import Entry


class LateWork:
    """A message that is sent when it is waited for; until then the tensors that receive it are NaN."""

    def __init__(self, send: Callable[[], Any], received: list[Tensor]) -> None:
        self.send: Callable[[], Any] | None = send
        for x in received:
            x.view(-1).view(torch.uint8).fill_(255)

    def wait(self, timeout: Any = None) -> bool:
        send, self.send = self.send, None
        if send is not None:
            send()
        return True

    def is_completed(self) -> bool:
        return self.send is None


def late(message: Callable[..., Any], *, receives: int | None) -> Callable[..., Any]:
    """Return a collective whose tensor at the index ``receives`` is an output, and arrives late."""

    def start(*args: Any, async_op: bool = False, **named: Any) -> Any:
        if not async_op:
            return message(*args, **named)
        return LateWork(lambda: message(*args, **named), [] if receives is None else [args[receives]])

    return start


def late_transfers(messages: list[Any]) -> list[LateWork]:
    begin = dist.distributed_c10d.batch_isend_irecv
    received = [x.tensor for x in messages if x.op is dist.irecv]
    return [LateWork(lambda: [work.wait() for work in begin(messages)], received)]


@contextmanager
def late_messages() -> Iterator[None]:
    with ExitStack() as stack:
        for module, name, receives in [
            (dist, "all_to_all_single", 0),
            (world, "all_gather_single", 0),
            (dist, "all_reduce", None),  # in place
            (dist, "broadcast", None),
        ]:
            stack.enter_context(patch.object(module, name, late(getattr(module, name), receives=receives)))
        stack.enter_context(patch.object(dist, "batch_isend_irecv", late_transfers))
        yield


SHARDS = (4, 3)
DRAWN = WHOLE_ZOO[:: 1 if EVERY_CASE else 6]


def in_time_and_late(indices: list[int]) -> list[tuple[str, list[Any], list[Any]]]:
    found = []
    for entry in (WHOLE_ZOO[index] for index in indices):
        for ring in (False, True):
            loss = wrapped(entry, ring=ring)
            rows = [x.split(SHARDS)[dist.get_rank()] for x in of_all_ranks(entry)]
            if loss is not None and not (ring and loss.loss.stated(rows, {}).needs.no_ring):  # by ids, for one
                with splitting(always=True):
                    expected = value_and_gradients(copy.deepcopy(loss), rows)
                    with late_messages():
                        late_ones = value_and_gradients(loss, rows)
                found.append((f"{entry}, ring={ring}", *([x.detach() for x in y] for y in (expected, late_ones))))
    return found


def of_all_ranks(entry: Entry) -> list[Tensor]:
    return whole_batch(entry.case(), GlobalBatch(SHARDS, d=3, labels="mixed", seed=5))


def wrapped(entry: Entry, *, ring: bool) -> cz.DistributedLoss | None:
    try:
        return cz.DistributedLoss(entry.case(temperature=0.3).make().loss, ring=ring).double()
    except ValueError:
        return None


def test_nothing_reads_a_message_before_it_arrives(worlds: Worlds) -> None:
    indices = [WHOLE_ZOO.index(entry) for entry in DRAWN]
    for of_rank in worlds.run(2, in_time_and_late, indices):
        assert sum("ring=True" in name for name, *_ in of_rank) > 3
        for name, expected, found in of_rank:
            assert len(expected) == len(found)
            for x, y in zip(expected, found, strict=True):
                torch.testing.assert_close(y, x, rtol=1e-12, atol=1e-14, msg=lambda text, name=name: f"{name}: {text}")


def test_a_buffer_that_is_read_too_soon_would_be_noticed(worlds: Worlds) -> None:
    """The mutant: a ring that does not wait for the next candidates."""
    index = next(i for i, entry in enumerate(WHOLE_ZOO) if str(entry) == "InfoNCE")

    def job() -> list[Any]:
        with pytest.MonkeyPatch.context() as of_rank:
            of_rank.setattr(SendReceive, "wait", lambda self: self.received)
            rows = [x.split(SHARDS)[dist.get_rank()] for x in of_all_ranks(WHOLE_ZOO[index])]
            with splitting(always=True), late_messages():
                loss = wrapped(WHOLE_ZOO[index], ring=True)
                assert loss is not None
                return [x.detach() for x in value_and_gradients(loss, rows)]

    assert all(found[0].isnan() for found in worlds.run(2, job))
