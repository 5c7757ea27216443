"""Ranks that call in another order are told so; another order of names is none. tests/random_steps has the differences."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import error_message, numbers

NUMBERED = "which is wrapper number"
ORDERS = {
    "backward passes": "rank 0 is in the backward pass of NTXent, call 1; rank 1 is in the backward pass of NTXent, call 1",
    "first calls": NUMBERED,
    "later calls": NUMBERED,
}


def in_another_order(what: str) -> str | None:
    """Two wrappers of one class and of equal settings, in a group of their own, which is lost."""
    group, order = dist.new_group([0, 1]), slice(None, None, 1 - 2 * dist.get_rank())
    wrappers = [cz.DistributedLoss(cz.NTXent(), process_group=group) for _ in range(2)]

    def call(wrapper: cz.DistributedLoss, seed: int) -> Tensor:
        return wrapper(*(numbers(4, 5, seed=seed + i + dist.get_rank()).requires_grad_() for i in (0, 20)))

    with splitting(always=True):
        values = [call(x, seed) for seed, x in enumerate(wrappers)] if what != "first calls" else []
        if what == "backward passes":
            return error_message(lambda: [x.backward() for x in values[order]], cz.CommunicationError)
        return error_message(lambda: [call(x, 40) for x in wrappers[order]], cz.CommunicationError)


@pytest.mark.parametrize("what", ORDERS)
def test_another_order_is_named(what: str, worlds: Worlds) -> None:
    first, second = worlds.run(2, in_another_order, what)
    assert first == second
    assert ORDERS[what] in str(first)
    assert ORDERS[what] != NUMBERED or len({*re.findall(f"{NUMBERED} (\\d+) of this process", str(first))}) == 2


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
