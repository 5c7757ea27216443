"""A rank that raises, dies, stops, is late or runs out of batches: every other rank soon says what happened."""

import math
import threading
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import contrastive_zoo as cz
from contrastive_zoo.engine import softmax
from contrastive_zoo.engine.exchange import SendReceive
from contrastive_zoo.ranks import messages, randomness
from contrastive_zoo.ranks.messages import CommunicationError, _note
from contrastive_zoo.ranks.transport import broadcast_in_place, exchange_rows, reduced_everywhere
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.worlds import Worlds
from tests import faults
from tests.helpers import assert_says, error_message, numbers, refused


@pytest.fixture(scope="module")
def runs() -> dict[str, faults.Outcome]:
    return faults.run_faults()


@pytest.mark.parametrize("name", faults.FAULTS)
def test_the_other_rank_says_what_happened_and_ends(runs: dict[str, faults.Outcome], name: str) -> None:
    """But for late ranks, the group's time-out is half an hour."""
    outcome = runs[name]
    assert outcome.kind == "CommunicationError", outcome
    assert_says(outcome.text, faults.FAULTS[name].says)
    assert outcome.ended, "an orphan"


def local_rows() -> Tensor:
    return numbers(4, 3, seed=dist.get_rank()).requires_grad_()


def raises(embeddings: Tensor) -> Tensor:
    raise KeyError("a column is missing")


class Busy:
    """The store of ranks, which answers only after it was waited for three times."""

    def __init__(self, store: Any) -> None:
        self.store, self.answers, self.pauses = store, threading.Event(), 0

    def check(self, keys: list[str]) -> bool:
        self.answers.wait()
        return bool(self.store.check(keys))

    def get(self, key: str) -> bytes:
        return bytes(self.store.get(key))

    def pause(self, *_: Any) -> None:
        self.pauses += 1
        if self.pauses == 3:
            self.answers.set()


def after_an_error_with_a_busy_store() -> tuple[float, int]:
    group, busy = dist.new_group(), Busy(dist.distributed_c10d._get_default_store())
    assert error_message(lambda: cz.DistributedLoss(raises, process_group=group)(local_rows()), KeyError)
    with (
        patch.object(messages, "STORE_TIMEOUT", 0.01),
        patch.object(messages, "pause", busy.pause),
        patch.object(dist.distributed_c10d, "_get_default_store", lambda: busy),
    ):
        loss_fn = cz.DistributedLoss(lambda z: z.square().sum(), process_group=group)
        return loss_fn(local_rows()).item(), busy.pauses


def test_a_store_that_does_not_answer_yet_is_no_rank_out_of_step(worlds: Worlds) -> None:
    expected = sum(numbers(4, 3, seed=rank).square().sum().item() for rank in range(2))
    for value, pauses in worlds.run(2, after_an_error_with_a_busy_store):
        assert value == pytest.approx(expected)
        assert pauses >= 3


def test_a_store_that_has_answered_is_not_held(worlds: Worlds) -> None:
    """Its server would answer a process group to come with addresses of this one."""

    def job() -> bool:
        value = cz.DistributedLoss(lambda z: z.square().sum(), process_group=dist.new_group())(local_rows())
        return value.item() > 0 and messages._asked is None

    assert worlds.run(2, job) == [True] * 2


def late_for_a_broadcast(mutant: bool) -> tuple[str | None, list[float]]:
    """The error of a loss that raises on every rank, and calls after it: rank 3 comes late, and rank 1 waits for it."""
    rank, group, call = dist.get_rank(), dist.new_group(), 0
    store = dist.PrefixStore(group.group_name, dist.distributed_c10d._get_default_store())

    def broadcast(*args: Any) -> None:
        if rank == 3:
            store.wait([f"rank 1 has looked for a note in call {call}"])
        broadcast_in_place(*args)

    def note(member: cz.World, before: float = math.inf) -> str | None:
        if rank == 1:
            store.wait(["rank 0 has failed"])
        found = _note(member, math.inf if mutant else before)
        if rank == 1:
            store.set(f"rank 1 has looked for a note in call {call}", "")
        return found

    with patch.object(randomness, "broadcast_in_place", broadcast), patch.object(messages, "_note", note):
        loss_fn = cz.DistributedLoss(raises, process_group=group)
        error = error_message(lambda: loss_fn(local_rows()), (KeyError, CommunicationError))
        if rank == 0:
            store.set("rank 0 has failed", "")
        later, values = cz.DistributedLoss(lambda z: z.square().sum(), process_group=group), []
        while not mutant and call < 2:
            call += 1
            values.append(later(local_rows()).item())
        return error, values


def test_an_error_of_all_ranks_is_raised_on_one_that_waits_and_disturbs_no_later_call(worlds: Worlds) -> None:
    total = sum(numbers(4, 3, seed=rank).square().sum().item() for rank in range(4))
    expected = "'a column is missing'", pytest.approx([total] * 2)
    assert worlds.run(4, late_for_a_broadcast, mutant=False) == [expected] * 4
    _, (error, _), *_ = worlds.run(4, late_for_a_broadcast, mutant=True)
    assert_says(error, "rank 1 waited in a broadcast for a rank that has failed. Rank 0 failed in raises, call 1")


class Interrupted(nn.Module):
    calls = 0

    def forward(self) -> Tensor:
        self.calls += 1
        if self.calls == 2 and dist.get_rank() == 1:
            raise KeyboardInterrupt
        return torch.tensor(0.5)


def test_a_rank_that_is_interrupted_in_a_setting_tells_the_others(worlds: Worlds) -> None:
    def job() -> list[str | None]:
        loss_fn = cz.DistributedLoss(cz.NTXent(temperature=Interrupted()), process_group=dist.new_group())
        kinds = KeyboardInterrupt, CommunicationError
        return [error_message(lambda: loss_fn(local_rows(), local_rows()), kinds) for _ in range(3)]

    (first, zero, again), (_, one, later) = worlds.run(2, job)
    assert first is None
    assert one == ""
    reason = "Rank 1 failed in NTXent, call 2: KeyboardInterrupt."
    assert zero == f"NTXent, call 2: rank 0 waited in the handshake for a rank that has failed. {reason}"
    assert_says(again, f"the process group failed earlier. {zero}")
    assert_says(later, f"rank 1 failed in its last call, and not all ranks did. {reason}")


def test_a_failure_in_the_backward_pass_is_told(worlds: Worlds) -> None:
    def job() -> str | None:
        with splitting(always=True):
            loss = cz.DistributedLoss(cz.Clip(), process_group=dist.new_group([0, 1]))(local_rows(), 2 * local_rows())
            exhausted = patch.object(softmax, "gradient_buffer", side_effect=MemoryError("no memory for the gradient"))
            with exhausted if dist.get_rank() == 1 else nullcontext():
                return error_message(loss.backward, (MemoryError, CommunicationError))

    zero, one = worlds.run(2, job)
    assert one == "no memory for the gradient"
    assert_says(zero, f"Clip, call 1: rank 0 waited in … Rank 1 failed in Clip, call 1: MemoryError: {one}.")


def left_waiting() -> list[str | None]:
    """What rank 0 learns in each message without which rank 1 has failed, in a group of its own."""
    found = []
    for wait in (
        lambda world: broadcast_in_place(torch.ones(1), 1, world),
        lambda world: reduced_everywhere(torch.ones(1), "sum", world),
        lambda world: exchange_rows(torch.ones(2, 1), [1, 1], [1, 1], world),
    ):
        world = cz.World.of(dist.new_group([0, 1]))
        cz.collectives.all_reduce(torch.ones(1), process_group=world)
        if world.rank == 0:
            found.append(error_message(lambda wait=wait, world=world: wait(world), CommunicationError))
        else:
            messages.report(KeyError("a column is missing"), world)
    return found


def test_no_message_waits_for_a_rank_that_has_failed(worlds: Worlds) -> None:
    """The group's own time-out is half an hour."""
    found, _ = worlds.run(2, left_waiting)
    why = "for a rank that has failed. Rank 1 failed: KeyError: 'a column is missing'."
    assert found == [f"rank 0 waited in {x} {why}" for x in ("a broadcast", "an all-reduce", "an exchange of rows")]


def notes_of_an_earlier_group() -> tuple[str | None, str | None]:
    """A rank's first message on a group clears what an earlier group of the same name has left."""
    world = cz.World.of(dist.new_group([0, 1]))
    store, key = dist.distributed_c10d._get_default_store(), f"contrastive_zoo/failure/{world.process_group.group_name}"
    if world.rank == 0:
        store.set(key, "0")
        store.set(f"{key}/1", "0\n0\nRank 1 failed long ago.")
    dist.barrier()
    cz.collectives.all_reduce(torch.ones(1), process_group=world)
    found = _note(world)
    dist.barrier()
    if world.rank == 1:
        store.set(f"{key}/1", "0\n1\nRank 1 failed just now.")
        store.set(key, "0")
    dist.barrier()
    return found, _note(world)


def test_a_note_of_an_earlier_group_is_not_read(worlds: Worlds) -> None:
    assert worlds.run(2, notes_of_an_earlier_group) == [(None, "Rank 1 failed just now."), (None, None)]


def test_a_group_that_failed_is_not_used_again_and_the_error_has_that_of_the_backend(worlds: Worlds) -> None:
    def job() -> list[tuple[str, str]]:
        group = dist.new_group([0, 1])
        loss_fn, found = cz.DistributedLoss(cz.NTXent(), process_group=group), []
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.7), group)
        for _ in range(2 if dist.get_rank() == 0 else 0):
            with pytest.raises(CommunicationError) as caught:
                loss_fn(local_rows(), local_rows())
            found.append((str(caught.value), repr(caught.value.__cause__)))
        return found

    ((first, cause), (again, _)), _ = worlds.run(2, job)
    assert_says(first, "NTXent, call 1: rank 0 waited … s in the handshake, and not all ranks came.")
    assert again == f"NTXent, call 1: rank 0: the process group failed earlier. {first}"
    assert_says(cause, "RuntimeError … Timed out")


def test_a_transfer_of_the_ring_is_waited_for_in_one_piece(worlds: Worlds) -> None:
    def job() -> list[float]:
        rank = dist.get_rank()
        rows = torch.full((2,), float(rank))
        with patch.object(messages, "_wait_and_look", side_effect=AssertionError("a look for a note")):
            return SendReceive(rows, 1 - rank, 2, 1 - rank, cz.World.of()).wait().tolist()

    assert worlds.run(2, job) == [[1.0, 1.0], [0.0, 0.0]]


def step(context: Callable[[Any], Any] = lambda model: nullcontext(), *, warm: bool = False) -> Tensor:
    """Return the loss of a DDP module inside of a context, after a step outside of it if ``warm``."""
    torch.manual_seed(0)
    model, loss_fn = DistributedDataParallel(nn.Linear(3, 2)), cz.DistributedLoss(cz.NTXent())
    rank = torch.distributed.get_rank()
    for is_last in (False, True) if warm else (True,):
        with context(model) if is_last else nullcontext():
            rows = torch.cat([numbers(2, 3, seed=rank), numbers(2, 3, seed=9 + rank)]).float()
            value = loss_fn(*model(rows).chunk(2))
            value.backward()
    return value.detach()


CONTEXTS: dict[str, Callable[[Any], Any]] = {
    "join()": lambda model: model.join(),
    "Join": lambda model: Join([model], throw_on_early_termination=True),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_loss_inside_of_join_is_refused_on_every_rank(name: str, worlds: Worlds) -> None:
    words = "NTXent: DDP's join() is active. A rank that has run out of batches answers DDP's messages"
    for warm in (False, True):
        refused(worlds, 2, lambda warm=warm: step(CONTEXTS[name], warm=warm), words)


def test_a_loss_outside_of_join_is_computed(worlds: Worlds) -> None:
    """In a context that is not enabled, and after one that has ended, with or without an error."""

    def job() -> list[Tensor]:
        found = [step(lambda model: model.join(enable=False))]
        assert error_message(lambda: step(CONTEXTS["join()"]))
        with DistributedDataParallel(nn.Linear(3, 2)).join():
            pass
        return [*found, step()]

    for found in worlds.run(2, job):
        assert torch.stack(found).isfinite().all()
