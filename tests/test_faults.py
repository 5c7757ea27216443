"""A rank that raises, dies, stops or is late: every other rank ends soon, with an error that says what happened."""

import itertools
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.engine import softmax
from contrastive_zoo.engine.exchange import SendReceive
from contrastive_zoo.ranks import messages
from contrastive_zoo.ranks.adjoints import reduced_to
from contrastive_zoo.ranks.messages import CommunicationError, _note
from contrastive_zoo.ranks.transport import broadcast_in_place, exchange_rows
from contrastive_zoo.ranks.world import World
from contrastive_zoo.testing.worlds import RankError, Worlds, report
from contrastive_zoo.wrapper.step import splitting
from tests.helpers import EVERY_CASE, error_message, numbers

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import faults

TIMEOUT = 2.0

GONE, LATE = "lost the connection to another rank in", "and not all ranks came"

SAYS: dict[str, tuple[str, ...]] = {
    "exception before the loss": ("NTXent, call 3: rank 0", GONE, "the handshake"),
    "exception in a third-party loss": (
        "Rank 1 failed in third_party, call 3: FileNotFoundError: no such file: cat.jpg",
    ),
    "exception between two messages of a loss": (
        "Rows, call 3: rank 0 waited in an exchange of rows",
        "Rank 1 failed in Rows, call 3: FileNotFoundError: no such file: cat.jpg",
    ),
    "exception after the loss": ("average_gradients: rank 0", GONE),
    "out of memory between two messages": ("Rank 1 failed in Rows, call 3: RuntimeError", "memory"),
    "out of memory in a third-party loss": ("Rank 1 failed in third_party, call 3: RuntimeError", "memory"),
    "SIGKILL before the loss": ("NTXent, call 3: rank 0", GONE, "the handshake"),
    "SIGKILL in the loss": ("Rows, call 3: rank 0", GONE, "an exchange of rows"),
    "os._exit before the loss": ("NTXent, call 3: rank 0", GONE, "the handshake"),
    "SIGSTOP before the loss": ("NTXent, call 3: rank 0 waited 2 s in the handshake", LATE),
    "SIGSTOP in the loss": ("Rows, call 3: rank 0 waited 2 s in an exchange of rows", LATE),
    "sleep beyond the time-out": ("NTXent, call 3: rank 0 waited 2 s in the handshake", LATE),
    "Ctrl-C in the loss": ("Rank 1 failed in Rows, call 3: KeyboardInterrupt.",),
    "one call more than elsewhere": (
        "ranks are out of step: rank 0 is in average_gradients; rank 1 is in NTXent, call",
    ),
    "a shorter epoch": ("NTXent, call 3: rank 0 waited 2 s in the handshake", LATE, "epochs of different length"),
    "the loss in a forked worker": ("this process was forked from a rank", "Call the loss in the rank itself"),
}
"""What rank 0 says of a fault of rank 1."""

DRAWN = [
    "exception before the loss",
    "exception in a third-party loss",
    "exception between two messages of a loss",
    "SIGKILL in the loss",
    "SIGSTOP before the loss",
    "one call more than elsewhere",
    "a shorter epoch",
    "the loss in a forked worker",
]
"""One of each kind: the others run in ``make search``."""


NAMES = list(SAYS) if EVERY_CASE else DRAWN


@pytest.fixture(scope="module")
def runs() -> dict[str, faults.Run]:
    """The faults, several at once: their ranks mostly wait."""
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(NAMES, pool.map(lambda name: faults.run_fault(name, timeout=TIMEOUT), NAMES), strict=True))


@pytest.fixture(scope="module")
def patient() -> Iterator[Worlds]:
    """Worlds whose other ranks have time to look for a note after one has failed."""
    with Worlds(timeout=20.0, grace=10.0) as pool:
        yield pool


def test_every_fault_is_described() -> None:
    elsewhere = {faults.LINK_CUT}  # tests/test_two_hosts.py
    in_words_of_ddp = {"one call more than elsewhere, under DDP"}
    assert SAYS.keys() == faults.FAULTS.keys() - elsewhere - in_words_of_ddp


@pytest.mark.parametrize("name", NAMES)
def test_the_other_rank_says_what_happened_and_ends_soon(runs: dict[str, faults.Run], name: str) -> None:
    outcome = runs[name].outcomes[0]
    assert outcome.kind == "CommunicationError", outcome
    for words in SAYS[name]:
        assert words in outcome.text
    assert outcome.seconds is not None
    assert outcome.seconds < 2 * TIMEOUT
    assert outcome.ended, "an orphan"


# ------------------------------------------------------------------------------------------------- ranks that can speak


def raises_on(ranks: list[int]) -> Any:
    """A third-party loss that raises on some ranks."""
    raises = itertools.repeat(dist.get_rank() in ranks)  # in its call it sees one process

    def loss(embeddings: Tensor) -> Tensor:
        if next(raises):
            raise KeyError("a column is missing")
        return embeddings.square().sum()

    return loss


def local_rows() -> Tensor:
    return numbers(4, 3, seed=dist.get_rank()).requires_grad_()


def after_an_error_of_all_ranks() -> float:
    failing, loss_fn = cz.DistributedLoss(raises_on([0, 1])), cz.DistributedLoss(raises_on([]))
    assert error_message(lambda: failing(local_rows()), KeyError)
    if dist.get_rank() == 1:
        time.sleep(0.8)  # long enough for rank 0 to look for a note
    return loss_fn(local_rows()).item()


def test_an_error_that_all_ranks_raise_disturbs_no_later_call(worlds: Worlds) -> None:
    expected = sum(numbers(4, 3, seed=rank).square().sum().item() for rank in range(2))
    assert worlds.run(2, after_an_error_of_all_ranks) == pytest.approx([expected] * 2)


def messages_of_failures(worlds: Worlds, world_size: int, job: Any) -> dict[int, str]:
    """What each rank reports that raises in ``job``."""
    found: dict[int, str] = {}
    with pytest.raises(RankError):
        worlds.run(world_size, reporting, job, on_message=found.__setitem__)
    return found


def reporting(job: Any) -> None:
    try:
        job()
    except BaseException as error:
        report(f"{type(error).__name__}: {error}")
        raise


def test_all_ranks_learn_the_sentence_of_a_rank_that_lives_on(patient: Worlds) -> None:
    def job() -> None:
        loss_fn = cz.DistributedLoss(raises_on([1]))
        loss_fn(local_rows())
        loss_fn(local_rows())

    found = messages_of_failures(patient, 3, job)
    assert found[1] == "KeyError: 'a column is missing'"
    for rank in (0, 2):
        assert found[rank] == (
            f"CommunicationError: loss, call 2: rank {rank} waited in the handshake for a rank that has failed. "
            "Rank 1 failed in loss, call 1: KeyError: 'a column is missing'."
        )


def backward_that_fails_on_rank_1() -> None:
    a, b = local_rows(), local_rows()
    with splitting(always=True):
        loss = cz.DistributedLoss(cz.Clip())(a, 2 * b)
        if dist.get_rank() == 1:
            softmax.gradient_buffer = exhausted
        loss.backward()


def exhausted(*_: Any) -> Tensor:
    raise MemoryError("no memory for the gradient")


def test_a_failure_in_the_backward_pass_is_told(patient: Worlds) -> None:
    found = messages_of_failures(patient, 2, backward_that_fails_on_rank_1)
    assert found[1] == "MemoryError: no memory for the gradient"
    assert "Clip, call 1: rank 0 waited in" in found[0]
    assert "Rank 1 failed in Clip, call 1: MemoryError: no memory for the gradient." in found[0]


def left_waiting() -> list[str | None]:
    """What rank 0 learns in each message without which rank 1 has failed, in a group of its own."""
    found = []
    for wait in (
        lambda world: broadcast_in_place(torch.ones(1), 1, world),
        lambda world: reduced_to(torch.ones(1), 0, "sum", world),
        lambda world: exchange_rows(torch.ones(2, 1), [1, 1], [1, 1], world),
    ):
        world = World.of(dist.new_group([0, 1]))
        cz.collectives.all_reduce(torch.ones(1), process_group=world)
        if world.rank == 0:
            found.append(error_message(lambda wait=wait, world=world: wait(world), CommunicationError))
        else:
            messages.report(KeyError("a column is missing"), world)
    return found


def test_no_message_waits_for_a_rank_that_has_failed(patient: Worlds) -> None:
    """The group's own time-out is half an hour."""
    found, _ = patient.run(2, left_waiting)
    for text, message in zip(found, ("a broadcast", "a reduction to one rank", "an exchange of rows"), strict=True):
        assert text == (
            f"rank 0 waited in {message} for a rank that has failed. Rank 1 failed: KeyError: 'a column is missing'."
        )


# --------------------------------------------------------------------------------------------------------- the mechanism


def notes_of_an_earlier_group() -> tuple[str | None, str | None]:
    """A rank's first message on a group clears what an earlier group of the same name has left."""
    world = World.of()
    store, key = dist.distributed_c10d._get_default_store(), f"contrastive_zoo/failure/{world.process_group.group_name}"
    if world.rank == 0:
        store.set(key, "1\n1\nRank 1 failed long ago.")
    dist.barrier()
    cz.collectives.all_reduce(torch.ones(1))
    found = _note(world)
    dist.barrier()
    if world.rank == 1:
        store.set(key, "1\n1\nRank 1 failed just now.")
    dist.barrier()
    return found, _note(world)


def test_a_note_of_an_earlier_group_is_not_read(patient: Worlds) -> None:
    assert patient.run(2, notes_of_an_earlier_group) == [(None, "Rank 1 failed just now."), (None, None)]


def late_in_a_group() -> list[str | None]:
    """Both errors of rank 0 in a group of a short time-out: the first, and that of the next call."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=0.7))
    loss_fn = cz.DistributedLoss(cz.NTXent(), process_group=group)
    if dist.get_rank() == 1:
        time.sleep(2)
        return []
    return [error_message(lambda: loss_fn(local_rows(), local_rows()), CommunicationError) for _ in range(2)]


def test_a_group_that_failed_is_not_used_again(patient: Worlds) -> None:
    (first, again), _ = patient.run(2, late_in_a_group)
    assert first is not None
    assert first.startswith("NTXent, call 1: rank 0 waited 1 s in the handshake, and not all ranks came.")
    assert again == f"NTXent, call 1: rank 0: the process group failed earlier. {first}"


def test_the_error_is_chained_to_that_of_the_backend(patient: Worlds) -> None:
    def job() -> str | None:
        group = dist.new_group([0, 1], timeout=timedelta(seconds=0.6))
        if dist.get_rank() == 1:
            time.sleep(1.5)
            return None
        try:
            cz.collectives.all_gather(torch.ones(1), process_group=group)
        except CommunicationError as error:
            return f"{type(error.__cause__).__name__}: {error.__cause__}"
        return None

    cause, _ = patient.run(2, job)
    assert cause is not None
    assert cause.startswith("RuntimeError")
    assert "Timed out" in cause


def late_transfer() -> list[list[float]]:
    rank = dist.get_rank()
    time.sleep(0.9 * rank)  # longer than until the first look for a note
    rows = torch.full((2, 1), float(rank))
    return SendReceive(rows, 1 - rank, 2, 1 - rank, World.of()).wait().tolist()


def test_a_transfer_of_the_ring_is_waited_for_in_one_piece(patient: Worlds) -> None:
    assert patient.run(2, late_transfer) == [[[1.0], [1.0]], [[0.0], [0.0]]]
