"""The exchange that opens a step: what follows its header, and what it ends in."""

import gc
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.ranks.fingerprint import DISTINCT, ONE_ROW, REPEATED, equal_arguments, fingerprint, levels_differ
from contrastive_zoo.ranks.handshake import _IDLE, PAYLOAD_LIMIT, Agreed, Statement, reserve_payload, shake_hands
from contrastive_zoo.ranks.messages import FIRST_CALLS
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.messages import Messages
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import error_message, numbers


def statement(rows: int = 0, **given: Any) -> Statement:
    """Of a loss whose rows may follow the header: so many bytes, this rank's number each."""
    payload = [torch.full((rows,), dist.get_rank() + 1, dtype=torch.uint8)]
    return Statement("Loss", sizes=[rows], payload=payload, **given)


def shaken(*rows: int, failing_rank: int | None = None) -> Agreed:
    """The failing rank states -1 bytes, as if its rows were on an accelerator: then all ranks gather them."""
    stated = statement(rows[dist.get_rank()])
    if dist.get_rank() == failing_rank:
        stated.payload = None
    agreed = shake_hands(stated, cz.World.of())
    reserve_payload(agreed.needed, cz.World.of())
    return agreed


def test_rows_follow_the_header_once_ranks_know_how_many_and_all_can_send_them(worlds: Worlds) -> None:
    def job() -> list[list[int] | None]:
        for _ in range(_IDLE + 1):
            shake_hands(Statement("idle"), cz.World.of())
        steps = [(3, 2), (3, 2), (1, 0), (5, 2), (5, 5), (PAYLOAD_LIMIT + 1, 1), (5, 5)]
        found = [shaken(*sizes) for sizes in steps]
        for _ in range(_IDLE - 1):
            shake_hands(Statement("idle"), cz.World.of())
        found.append(shaken(5, 5))
        for _ in range(_IDLE):
            shake_hands(Statement("idle"), cz.World.of())
        found += [shaken(5, 5), shaken(5, 5), shaken(5, 5, failing_rank=1)]
        return [None if x.payload is None else x.payload.sum(1).tolist() for x in found]

    # too many for the bytes reserved: the next time they fit; more than the limit never follow
    expected = [None, [3, 4], [1, 0], None, [5, 10], None, [5, 10], [5, 10], None, [5, 10], None]
    assert worlds.run(2, job) == [expected] * 2


@example(sizes=[*range(40)])  # more than fit into a header
@given(sizes=st.lists(st.integers(0, 2**40), max_size=40))
def test_any_number_of_sizes(sizes: list[int], worlds: Worlds) -> None:
    def job() -> list[tuple[int, ...]]:
        mine = [x + dist.get_rank() for x in sizes]
        return [shards.sizes for shards in shake_hands(Statement("Loss", sizes=mine), cz.World.of()).shards]

    assert worlds.run(2, job) == [[(x, x + 1) for x in sizes]] * 2


def test_every_header_is_one_message_of_one_length(worlds: Worlds) -> None:
    """Whatever a rank brings; what differs is then said in further ones."""

    def job() -> list[int]:
        lengths = []
        for kind in range(4):
            with Messages() as messages:
                bring = [
                    Statement("Loss"),
                    Statement("Loss", {"a": "1"}, [1, 2], results={"value": 1.0}),
                    Statement("Other", problem="no"),
                    statement(3, digests=[7], same=1),
                ]
                error_message(partial(shake_hands, bring[(kind + dist.get_rank()) % 4], cz.World.of()))
            lengths.append(messages.sent[0].size or 0)
        return lengths

    zero, one = worlds.run(2, job)
    assert zero == one
    assert len(set(zero)) == 1


ONE, TWO, MINUS_ONE = (
    {"level": level, "state": {"w": torch.tensor([w]), "v": torch.ones(2)}}
    for level, w in ((1.0, 1.0), (2.0, 2.0), (2.0, -1.0))
)
ANCHORS = {"results": {"anchor": 1.0, "other anchor": 2.0}}

BRINGS: list[tuple[dict[str, Any], dict[str, Any], str | None]] = [
    ({"results": {"value": 1.0}}, {"results": {"value": 1.01}}, "rank 0 found 1 and rank 1 found 1.01"),
    (ONE, TWO, "w has norm 1 on rank 0 and 2 on rank 1. Call"),
    (ONE, MINUS_ONE, "w has norm 1 on rank 0 and 1 on rank 1, but other numbers. Call"),
    ({"results": {"value": 1.0}}, {"results": {"value": 1.0 + 1e-7}}, None),
    ({"results": {"value": 1.0}}, {}, None),
    ({"results": {"value": torch.nan}}, {"results": {"value": torch.nan}}, None),
    ({"results": {"sample": 1.0}}, {"results": {"sample": 1.01}}, "different losses of the same samples"),
    ({"results": {"gradient": 1.0}}, {"results": {"gradient": 1.01}}, "batch.shared(parameter)"),
    (
        ANCHORS,
        {"results": {"anchor": 2.0, "other anchor": 1.01}},
        "rank 0, which holds it, found 1, and rank 1 found 1.01",
    ),
    (ANCHORS, {"results": {"anchor": 2.0}}, None),
    ({"results": {"anchor": 1.0, "other anchor": 1.0}}, {"results": {"other anchor": 1.0}}, None),
    ({"level": 1.0}, {"level": 1.0 + 1e-5}, None),
    ({"level": 1.0}, {}, None),
    ({"same": 2}, {"same": 0}, None),
]
"""What two ranks bring, and what is the error, if any."""


def test_a_difference_is_one_error_on_every_rank(worlds: Worlds) -> None:
    def job() -> list[tuple[str | None, tuple[int, ...]]]:
        world, bad = cz.World.of(), [Statement("Loss", **brought[dist.get_rank()]) for brought in BRINGS]
        good = Statement("Loss", sizes=[3])
        return [(error_message(partial(shake_hands, x, world)), shake_hands(good, world).shards[0].sizes) for x in bad]

    one, other = worlds.run(2, job)
    assert one == other
    for (*_, words), (text, after) in zip(BRINGS, one, strict=True):
        assert (text is None) if words is None else (words in str(text))
        assert after == (3, 3)


NUMBERED = r"which is wrapper number (\d) of this process; .* which is wrapper number (?!\1)\d of this process"
BACKWARD = "rank 0 is in the backward pass of NTXent, .* rank 1 is in the backward pass of NTX"
SWAPPED = {"first calls": NUMBERED, "later calls": NUMBERED, "backward passes": BACKWARD}


@pytest.mark.parametrize("what", SWAPPED)
def test_two_wrappers_in_another_order_on_one_rank_are_named(what: str, worlds: Worlds) -> None:
    def job() -> str | None:
        group, order = dist.new_group(), slice(None, None, -1 if dist.get_rank() else 1)  # the group is lost
        with patch("contrastive_zoo.wrapper.call_history._made", 0):
            wrappers = [cz.DistributedLoss(cz.NTXent(), process_group=group) for _ in range(2)]
        rows = [numbers(4, 3, seed=seed + dist.get_rank()).requires_grad_() for seed in (0, 9)]

        def swapped() -> None:
            values = [] if what == "first calls" else [call(*rows) for call in wrappers]
            for x in (values if what == "backward passes" else wrappers)[order]:
                x.backward() if what == "backward passes" else x(*rows)

        with splitting(always=True):
            return error_message(swapped, cz.CommunicationError)

    first, second = worlds.run(2, job)
    assert first == second
    assert re.search(SWAPPED[what], str(first)), first


def rows_of_rank(seed: int = 0) -> list[Tensor]:
    return [numbers(4, 3, seed=20 * seed + 2 * dist.get_rank() + view) for view in range(2)]


def in_groups_in_turn() -> list[float]:
    """A call in a half of four ranks, one of which knows another wrapper, and one of all ranks; twice."""
    halves, group, rank = [dist.new_group(x) for x in ([0, 1], [2, 3])], dist.new_group(), dist.get_rank()
    if rank > 1:
        cz.DistributedLoss(cz.NTXent(), process_group=halves[1])(*rows_of_rank())
    loss, values = cz.DistributedLoss(cz.NTXent()), list[float]()
    for seed in range(4):
        loss.process_group = group if seed % 2 else halves[rank // 2]
        values.append(loss(*rows_of_rank(seed)).item())
    return values


def test_a_wrapper_goes_from_one_group_to_another(worlds: Worlds) -> None:
    def alone(seed: int, ranks: Sequence[int]) -> float:
        by_rank = [[numbers(4, 3, seed=20 * seed + 2 * rank + view) for view in range(2)] for rank in ranks]
        return float(cz.NTXent()(*map(torch.cat, zip(*by_rank, strict=True))))

    for rank, values in enumerate(worlds.run(4, in_groups_in_turn)):
        members = [[0, 1], [2, 3]][rank // 2], range(4)
        assert values == pytest.approx([alone(seed, members[seed % 2]) for seed in range(4)], abs=1e-10)


def test_wrappers_of_other_losses_may_be_made_in_any_order(worlds: Worlds) -> None:
    def job() -> list[float]:
        order = slice(None, None, -1 if dist.get_rank() else 1)
        made = {of: cz.DistributedLoss(of()) for of in (cz.NTXent, cz.InfoNCE, cz.SigLIP)[order]}
        return [made[of](*rows_of_rank()).item() for of in (cz.NTXent, cz.InfoNCE, cz.SigLIP)]

    one, other = worlds.run(2, job)
    assert one == other


def test_a_wrapper_that_is_made_anew_in_each_step_leaves_nothing_behind(worlds: Worlds) -> None:
    def job() -> tuple[int, int]:
        for _ in range(FIRST_CALLS + 3):
            cz.DistributedLoss(cz.NTXent())(*rows_of_rank())
        gc.collect()
        return len(cz.World.of().state.first_calls), len(cz.World.of().state.wrappers)

    assert worlds.run(2, job) == [(FIRST_CALLS, 0)] * 2


def test_ranks_in_two_functions_are_out_of_step(worlds: Worlds) -> None:
    def job(*functions: str) -> str | None:
        group = dist.new_group()  # it is lost
        stated = Statement(functions[dist.get_rank()], sizes=[3])
        return error_message(lambda: shake_hands(stated, cz.World.of(group)), (cz.CommunicationError, ValueError))

    assert worlds.run(2, job, "one", "one") == [None] * 2
    for text in worlds.run(2, job, "one", "another"):
        assert str(text).startswith("ranks are out of step: rank 0 is in one; rank 1 is in another. ")


F32 = torch.finfo(torch.float32).eps


def state() -> dict[str, Tensor]:
    """A table that is larger than the direction of a sketch, and two of equal shape."""
    return {"table": numbers(3000, 17, seed=0).float(), "a": numbers(5, 2, seed=1), "b": numbers(5, 2, seed=2)}


CHANGES: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "a share of a table": lambda x: {**x, "table": 1.003 * x["table"]},
    "a sign": lambda x: {**x, "b": -x["b"]},
    "rows that change places": lambda x: {**x, "table": x["table"][[1, 0, *range(2, 3000)]]},
    "tensors that change places": lambda x: {**x, "a": x["b"], "b": x["a"]},
    "one of many numbers": lambda x: {**x, "table": x["table"].index_fill(0, torch.tensor([2000]), 1.0)},
    "zeros": lambda x: {**x, "a": torch.zeros_like(x["a"])},
    "one number": lambda x: {**x, "a": x["a"] + torch.eye(5, 2)},
}


def level(x: dict[str, Tensor]) -> float:
    found = fingerprint(x, {})().level
    assert found is not None
    return found


def test_a_change_of_the_state_is_noticed_and_rounding_is_not() -> None:
    levels = {what: level(changed(state())) for what, changed in CHANGES.items()}
    assert [what for what, x in levels.items() if not levels_differ([level(state()), x], 3, F32)] == []
    rounded = {name: x.double() * (1 + 1e-7 * numbers(*x.shape, seed=9)) for name, x in state().items()}
    assert not levels_differ([level(state()), level(rounded)], 3, F32)


def test_a_level_is_that_of_any_order_and_layout() -> None:
    reverse = dict(reversed(state().items()))
    assert level({**reverse, "table": reverse["table"].T.contiguous().T}) == level(state())
    assert level({}) == level({"empty": torch.empty(0)}) == 0


@pytest.mark.parametrize("of", [0, 3, 65535, 2**24, 2**40])
def test_neighbouring_counts_differ_clearly(of: int) -> None:
    levels = [level({"count": torch.tensor([x])}) for x in (of, of + 1)]
    assert levels_differ(levels, 10, 2**-23)


def test_autocast_does_not_round_a_sketch() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        rounded = level(state())
    assert rounded == level(state())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_memory_of_what_was_read_can_be_freed(dtype: torch.dtype) -> None:
    """FSDP2 frees parameters after a backward pass, which torch refuses where NumPy looks at them."""
    state, rows = torch.ones(1, dtype=dtype), torch.ones(4, 3, dtype=dtype)
    fingerprint({"temperature": state}, {"x": rows})()
    for x in (state, rows):
        x.untyped_storage().resize_(0)


def kind(x: Tensor) -> int | None:
    digest = fingerprint(None, {"x": x})().digests.get("x")
    found, _ = equal_arguments({"x": x}, [(digest or 0,) * 2])
    return found.get("x")


def test_what_the_numbers_of_an_argument_are() -> None:
    embeddings = numbers(40, 96, seed=0)
    assert kind(embeddings) == kind(embeddings.bfloat16()) == kind(embeddings.relu()) == DISTINCT
    assert kind(embeddings[:2]) == kind(embeddings[:3, :2]) == kind(embeddings[0].cfloat()) == DISTINCT
    assert kind(torch.eye(40)) == kind(torch.linspace(0, 1, 40)) == kind(embeddings.sign()) == REPEATED
    assert kind(torch.arange(4)) == kind(torch.arange(40).view(8, 5)) == kind(torch.arange(4) > 2) == REPEATED
    assert kind(embeddings[:1]) == kind(embeddings[:1].expand(4, -1)) == kind(torch.ones(4).bool()) == ONE_ROW
    assert kind(torch.empty(0, 4)) is None


def equal(*of_ranks: tuple[Tensor, Tensor]) -> tuple[dict[str, int], list[int]]:
    digests = [fingerprint(None, dict(zip("xy", pair, strict=True)))().digests for pair in of_ranks]
    rows = dict(zip("xy", of_ranks[0], strict=True))
    found, copies = equal_arguments(rows, [[of.get(name, 0) for of in digests] for name in rows])
    return found, [*copies]


def test_equal_arguments_are_those_of_all_ranks_and_copies_those_of_two() -> None:
    a, b, c = (numbers(6, 4, seed=k) for k in range(3))
    none, labels, signs = a[:0], torch.arange(6), a.sign()
    assert equal((a, b), (a.clone(), a), (a, c)) == ({"x": DISTINCT}, [])
    assert equal((a, b), (a, c), (a, b)) == ({"x": DISTINCT}, [0, 2])
    assert equal((a, b), (a, b)) == ({"x": DISTINCT, "y": DISTINCT}, [0, 1])
    assert equal((a, none), (a, none)) == ({"x": DISTINCT}, [0, 1])
    assert equal((none, none), (none, none), (a, b)) == ({}, [])
    assert equal((a, labels), (b, labels), (a, labels + 1)) == ({}, [0, 2])
    assert equal((a, labels), (b, labels)) == ({"y": REPEATED}, [])
    assert equal((signs, labels), (signs, labels), (a, labels)) == ({"y": REPEATED}, [])
    assert equal((signs, labels), (signs, labels)) == ({"x": REPEATED, "y": REPEATED}, [0, 1])


def test_the_order_of_names_does_not_matter(worlds: Worlds) -> None:
    def total(towers: dict[str, Tensor], *, weight: float, **others: Tensor) -> Tensor:
        return weight * sum(i * x.square().sum() for i, (_, x) in enumerate(sorted((towers | others).items()), 1))

    def towers(rank: int) -> dict[str, Any]:
        return {name: numbers(3, 2, seed=ord(name) + rank) for name in "abcd"}

    def job() -> float:
        rank = dist.get_rank()
        named = dict([*towers(rank).items(), ("weight", 2.0)][:: 1 if rank else -1])
        return cz.DistributedLoss(total)({x: named.pop(x) for x in "abcd"[::2][:: 1 if rank else -1]}, **named).item()

    whole = {name: torch.cat([x, towers(1)[name]]) for name, x in towers(0).items()}
    assert worlds.run(2, job) == [pytest.approx(total(whole, weight=2.0).item(), rel=1e-12)] * 2
