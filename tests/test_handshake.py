"""The exchange that opens a step: what follows its header, and what it ends in."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from contrastive_zoo.ranks.handshake import _IDLE, PAYLOAD_LIMIT, Agreed, Statement, shake_hands
from contrastive_zoo.ranks.world import World
from contrastive_zoo.testing.messages import Messages
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import error_message


def statement(rows: int = 0, **given: Any) -> Statement:
    """Of a loss whose rows may follow the header: so many bytes, this rank's number each."""
    payload = [torch.full((rows,), dist.get_rank() + 1, dtype=torch.uint8)]
    return Statement("Loss", sizes=[rows], replicable=True, small=lambda shards: True, payload=payload, **given)


def shaken(*rows: int) -> Agreed:
    """A handshake to which each rank brings its number of rows."""
    return shake_hands(statement(rows[dist.get_rank()]), World.of())


def test_rows_follow_the_header_once_ranks_know_how_many(worlds: Worlds) -> None:
    def job() -> list[list[int] | None]:
        for _ in range(_IDLE + 1):
            shake_hands(Statement("idle"), World.of())
        steps = [(3, 2), (3, 2), (1, 0), (5, 2), (5, 5), (PAYLOAD_LIMIT + 1, 1), (5, 5)]
        found = [shaken(*sizes) for sizes in steps]
        for _ in range(_IDLE - 1):
            shake_hands(Statement("idle"), World.of())
        found.append(shaken(5, 5))
        for _ in range(_IDLE):
            shake_hands(Statement("idle"), World.of())
        found.append(shaken(5, 5))
        return [None if x.payload is None else x.payload.sum(1).tolist() for x in found]

    # too many for the bytes reserved: the next time they fit; more than the limit never follow
    expected = [None, [3, 4], [1, 0], None, [5, 10], None, [5, 10], [5, 10], None]
    assert worlds.run(2, job) == [expected] * 2


def test_no_rows_follow_if_one_rank_cannot_send_them(worlds: Worlds) -> None:
    """As where its rows lie on an accelerator: it states -1 bytes, and all ranks gather them instead."""

    def job() -> list[bool]:
        found = []
        for failing_rank in (None, 1, 1):
            stated = statement(3)
            if dist.get_rank() == failing_rank:
                stated.payload = None
            found.append(shake_hands(stated, World.of()).payload is None)
        return found[1:]

    assert worlds.run(2, job) == [[True, True]] * 2


@given(sizes=st.lists(st.integers(0, 2**40), max_size=40))
def test_any_number_of_sizes(sizes: list[int], worlds: Worlds) -> None:
    def job() -> list[tuple[int, ...]]:
        mine = [x + dist.get_rank() for x in sizes]
        return [shards.sizes for shards in shake_hands(Statement("Loss", sizes=mine), World.of()).shards]

    assert worlds.run(2, job) == [[(x, x + 1) for x in sizes]] * 2


def test_every_header_is_one_message_of_one_length(worlds: Worlds) -> None:
    """Whatever a rank brings; what differs is then said in further ones."""

    def job() -> list[int]:
        lengths = []
        for kind in range(4):
            with Messages() as messages:
                bring = [
                    Statement("Loss"),
                    Statement("Loss", {"a": "1"}, [1, 2], last_value=1.0),
                    Statement("Other", problem="no"),
                    statement(3, fingerprint=7, same=1),
                ]
                error_message(
                    lambda bring=bring, kind=kind: shake_hands(bring[(kind + dist.get_rank()) % 4], World.of())
                )
            lengths.append(messages.sent[0].size or 0)
        return lengths

    zero, one = worlds.run(2, job)
    assert zero == one
    assert len(set(zero)) == 1


SUMS = {"level": 1.0, "projection": 0.5}
ONE, TWO = ({"w": torch.full((1,), x)} for x in (1.0, 2.0))

ERRORS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "a value": ([{"last_value": 1.0}, {"last_value": 1.01}], "rank 0 found 1, rank 1 found 1.01"),
    "a norm": (
        [{**SUMS, "numbers": ONE}, {**SUMS, "level": 2.0, "numbers": TWO}],
        "w has norm 1 on rank 0 and 2 on rank 1",
    ),
    "a direction": (
        [SUMS, {**SUMS, "projection": -0.5}],
        "the loss's parameters, buffers or settings differ between ranks. Build",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_one_error_on_every_rank(name: str, worlds: Worlds) -> None:
    brought, words = ERRORS[name]

    def job() -> tuple[str | None, list[int]]:
        text = error_message(lambda: shake_hands(Statement("Loss", **brought[dist.get_rank()]), World.of()))
        return text, list(shake_hands(Statement("Loss", sizes=[3]), World.of()).shards[0].sizes)

    (text, after), other = worlds.run(2, job)
    assert words in (text or "")
    assert other == (text, after)
    assert after == [3, 3]


AGREEING: list[list[dict[str, Any]]] = [
    [{"last_value": 1.0}, {"last_value": 1.0 + 1e-7}],
    [{"last_value": 1.0}, {}],
    [{"last_value": torch.nan}, {"last_value": torch.nan}],
    [SUMS, {**SUMS, "level": 1.0 + 1e-5}],
    [SUMS, {}],
    [{"fingerprint": 5}, {"fingerprint": 6}],
    [{"fingerprint": 5}, {"fingerprint": 0}],
    [{"same": 2}, {"same": 0}],
]


@pytest.mark.parametrize("number", range(len(AGREEING)))
def test_what_is_no_difference(number: int, worlds: Worlds) -> None:
    def job() -> Tensor | None:
        return shake_hands(Statement("Loss", **AGREEING[number][dist.get_rank()]), World.of()).payload

    worlds.run(2, job)


def test_whoever_knows_that_a_loss_draws_says_it_for_all(worlds: Worlds) -> None:
    def job() -> list[bool]:
        statements = [
            Statement("Loss", sizes=[3], replicable=True, draws=dist.get_rank() == 1),
            Statement("Loss", sizes=[3], replicable=dist.get_rank() == 1, draws=True, small=lambda shards: True),
            Statement("Loss", sizes=[3], replicable=True, small=lambda shards: shards[0].total == 6),
        ]
        return [shake_hands(x, World.of()).replicate for x in statements]

    assert worlds.run(2, job) == [[True, False, True]] * 2
