"""What ranks compare and what not: names, orders of calls, buffers and errors; tests/random_steps has the differences."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import drawn, numbers


def test_what_tells_ranks_apart_by_its_name_is_no_difference(worlds: Worlds) -> None:
    def job() -> tuple[float, float]:
        rank, z = dist.get_rank(), numbers(3, 2, seed=dist.get_rank())

        def of_closure(rows: Tensor) -> Tensor:
            return rows.square().sum() * (1 + 0 * rank)

        loss = cz.SupCon()
        loss.rank, loss.is_main_process = rank, rank == 0
        return cz.DistributedLoss(of_closure)(z).item(), cz.DistributedLoss(loss)(z, torch.tensor([0, 1, 0])).item()

    first, second = worlds.run(2, job)
    assert first == second


def rows_of(seed: int) -> Tensor:
    return numbers(4, 5, seed=10 * seed + dist.get_rank()).requires_grad_()


LABELS = torch.tensor([0, 1, 0, 1])


def ended(job: Callable[[], Any]) -> tuple[str, str]:
    try:
        job()
    except (Exception, KeyboardInterrupt) as error:
        return type(error).__name__, str(error)
    return "", ""


def backward_in_another_order(group: Any) -> tuple[str, str]:
    with splitting(always=True):
        losses = [cz.DistributedLoss(cz.NTXent(temperature=t), process_group=group) for t in (0.1, 0.5)]
        values = [loss(rows_of(2 * i), rows_of(2 * i + 1)) for i, loss in enumerate(losses)]
        return ended(lambda: [x.backward() for x in in_own_order(values)])


def wrappers_in_another_order(group: Any, *, called: bool = False) -> tuple[str, str]:
    """Two of one class and of equal settings, before or after their first calls."""
    wrappers = [cz.DistributedLoss(cz.NTXent(), process_group=group) for _ in range(2)]
    for index, wrapper in enumerate(wrappers if called else ()):
        wrapper(rows_of(2 * index), rows_of(2 * index + 1))
    return ended(lambda: [x(rows_of(4), rows_of(5)) for x in in_own_order(wrappers)])


def in_own_order(x: list[Any]) -> list[Any]:
    return x if dist.get_rank() == 0 else x[::-1]


NUMBERED = "which is wrapper number"
ORDERS: dict[str, tuple[Callable[[Any], tuple[str, str]], str]] = {
    "backward passes": (
        backward_in_another_order,
        "rank 0 is in the backward pass of NTXent, call 1; rank 1 is in the backward pass of NTXent, call 1",
    ),
    "first calls": (wrappers_in_another_order, NUMBERED),
    "later calls": (functools.partial(wrappers_in_another_order, called=True), NUMBERED),
}


@pytest.mark.parametrize("name", ORDERS)
def test_another_order_is_named(name: str, worlds: Worlds) -> None:
    """In a group of their own, which is lost."""
    job, words = ORDERS[name]
    first, second = worlds.run(2, lambda: job(dist.new_group([0, 1])))
    assert first == second
    assert first[0] == "CommunicationError"
    assert words in first[1]
    assert words != NUMBERED or len({*re.findall(f"{NUMBERED} (\\d+) of this process", first[1])}) == 2


class Raises(cz.RowLoss):
    """Once, on the last rank, in the middle of a step."""

    error: Any = None

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        raise_once()
        return (similarity * negative).sum(1), negative.any(1)


def third_party(z: Tensor, labels: Tensor) -> Tensor:
    raise_once()
    return z.square().sum() + 0 * labels.sum()


armed: list[type[BaseException]] = []


def raise_once() -> None:
    if armed:
        raise armed.pop()("in the middle")


RAISING: dict[str, Callable[[], Any]] = {
    "RowLoss": Raises,
    "WeightedSum": lambda: cz.WeightedSum([cz.SupCon(), Raises()]),
    "third-party": lambda: third_party,
}


def goes_on(name: str, splits: bool, kind: type[BaseException]) -> list[tuple[str, str]]:
    armed.clear()
    loss_fn, ends = cz.DistributedLoss(RAISING[name](), process_group=dist.new_group([0, 1])), []
    with splitting(always=splits):
        for step in range(4):
            if step == 1 and dist.get_rank() == 1:
                armed.append(kind)
            ends.append(ended(lambda step=step: loss_fn(rows_of(step), LABELS)))
    return ends


@pytest.mark.parametrize(("name", "splits"), drawn(RAISING, (False, True), one_in=2))
def test_a_rank_that_raises_and_goes_on_closes_the_group(name: str, splits: bool, worlds: Worlds) -> None:
    """Never an abort or a value of another step. tests/test_failed_calls.py has a memory, of which all ranks hear it."""
    kind = KeyboardInterrupt if name == "RowLoss" else RuntimeError
    zero, one = worlds.run(2, goes_on, name, splits, kind)
    assert zero[0] == one[0] == ("", "")
    assert one[1][0] == kind.__name__
    for ends in (zero[2:], one[2:]):
        for how, text in ends:
            assert how == "CommunicationError"
            assert f"Rank 1 failed in {text.partition(',')[0]}, call 2: {kind.__name__}" in text
            assert "in the middle" in text


def test_the_order_of_names_does_not_matter(worlds: Worlds) -> None:
    def of_names(towers: dict[str, Tensor], **others: Any) -> Tensor:
        weight = others.pop("weight")
        return sum(i * x.square().sum() for i, (_, x) in enumerate(sorted((towers | others).items()), 1)) * weight

    def job() -> float:
        names = ["a", "b", "c", "d"][:: 1 if dist.get_rank() else -1]
        rows = {name: numbers(3, 2, seed=ord(name) + dist.get_rank()) for name in names}
        others = {name: rows.pop(name) for name in names if name in "bd"}
        named = {"weight": 2.0, **others} if dist.get_rank() else {**others, "weight": 2.0}
        return cz.DistributedLoss(of_names)(rows, **named).item()

    whole = [torch.cat([numbers(3, 2, seed=ord(x) + rank) for rank in range(2)]) for x in "abcd"]
    expected = 2 * sum(i * float(x.square().sum()) for i, x in enumerate(whole, 1))
    assert worlds.run(2, job) == [pytest.approx(expected, rel=1e-12)] * 2


def test_a_method_may_name_its_object_as_it_likes() -> None:
    class Renamed(cz.SupCon):
        def inputs(this, embeddings: Tensor, labels: Tensor) -> Any:  # noqa: N805 - the point of the test
            return cz.SupCon.inputs(this, embeddings, labels)

    z = numbers(4, 2, seed=0)
    assert torch.equal(Renamed()(z, LABELS), cz.SupCon()(z, LABELS))


def test_a_view_with_the_negative_bit(worlds: Worlds) -> None:
    def job() -> float:
        z = torch.view_as_complex(numbers(4, 3, 2, seed=dist.get_rank())).conj().imag
        assert z.is_neg()
        return cz.DistributedLoss(cz.SupCon())(z[: 4 * dist.get_rank()], LABELS[: 4 * dist.get_rank()]).item()

    z = torch.view_as_complex(numbers(4, 3, 2, seed=1)).conj().imag
    assert worlds.run(2, job) == [pytest.approx(cz.SupCon()(z, LABELS).item(), rel=1e-12)] * 2
