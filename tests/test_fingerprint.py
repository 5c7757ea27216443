"""A fingerprint tells apart what ranks must notice, and nothing that rounding makes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from contrastive_zoo.ranks.fingerprint import (
    DISTINCT,
    ONE_ROW,
    REPEATED,
    equal_arguments,
    fingerprint,
    levels_differ,
    norm_and_sketch,
)
from tests.helpers import numbers

F32 = torch.finfo(torch.float32).eps


def state() -> dict[str, Tensor]:
    """A table that is larger than the direction of a sketch, and two of equal shape."""
    return {"table": numbers(3000, 17, seed=0).float(), "a": numbers(5, 2, seed=1), "b": numbers(5, 2, seed=2)}


def swapped(x: Tensor, i: int, j: int) -> Tensor:
    result = x.clone()
    result[i], result[j] = x[j], x[i]
    return result


CHANGES: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "a share of a table": lambda x: {**x, "table": 1.003 * x["table"]},
    "a share of a small tensor": lambda x: {**x, "a": 1.003 * x["a"]},
    "a sign": lambda x: {**x, "b": -x["b"]},
    "rows that change places": lambda x: {**x, "table": swapped(x["table"], 0, 1)},
    "rows far apart that change places": lambda x: {**x, "table": swapped(x["table"], 0, 2999)},
    "tensors that change places": lambda x: {**x, "a": x["b"], "b": x["a"]},
    "one of many numbers": lambda x: {**x, "table": x["table"].index_fill(0, torch.tensor([2000]), 1.0)},
    "zeros": lambda x: {**x, "a": torch.zeros_like(x["a"])},
    "one number": lambda x: {**x, "a": x["a"] + torch.eye(5, 2)},
}


def level(x: dict[str, Tensor]) -> float:
    found = fingerprint(x, {})().level
    assert found is not None
    return found


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_the_state_is_noticed(what: str) -> None:
    first, second = state(), CHANGES[what](state())
    assert levels_differ([level(first), level(second)], len(first), F32)


def test_rounding_is_not() -> None:
    rounded = {name: x.double() * (1 + 1e-7 * numbers(*x.shape, seed=9)) for name, x in state().items()}
    assert not levels_differ([level(state()), level(rounded)], 3, F32)


def test_a_level_is_that_of_any_order_and_layout() -> None:
    reverse = dict(reversed(state().items()))
    assert level({**reverse, "table": reverse["table"].T.contiguous().T}) == level(state())
    assert level({}) == level({"empty": torch.empty(0)}) == 0


def test_autocast_does_not_round_a_sketch() -> None:
    x = state()["table"]
    with torch.autocast("cpu", torch.bfloat16):
        rounded = norm_and_sketch(x)
    assert torch.equal(rounded, norm_and_sketch(x))


def kind(x: Tensor) -> int | None:
    digest = fingerprint(None, {"x": x})().digests.get("x")
    found, _ = equal_arguments(["x"], [(digest or 0,) * 2])
    return found.get("x")


def test_what_the_numbers_of_an_argument_are() -> None:
    embeddings = numbers(40, 96, seed=0)
    assert kind(embeddings) == kind(embeddings.bfloat16()) == kind(embeddings.relu()) == DISTINCT
    assert kind(embeddings[:2]) == kind(embeddings[:3, :2]) == DISTINCT
    assert kind(torch.eye(40)) == kind(torch.linspace(0, 1, 40)) == kind(embeddings.sign()) == REPEATED
    assert kind(embeddings[:1]) == kind(embeddings[:1].expand(4, -1)) == kind(torch.ones(4)) == ONE_ROW
    assert kind(torch.arange(4)) is kind(torch.empty(0, 4)) is None


def test_equal_arguments_are_those_of_all_ranks() -> None:
    a, b = (numbers(6, 4, seed=k) for k in range(2))
    of_ranks = [fingerprint(None, {"x": x, "y": y})().digests for x, y in ((a, b), (a.clone(), a), (a, b))]
    digests = [[of[name] for of in of_ranks] for name in "xy"]
    assert equal_arguments("xy", digests) == ({"x": DISTINCT}, False)
    assert equal_arguments("xy", [digests[0]] * 2) == ({"x": DISTINCT, "y": DISTINCT}, True)
    assert equal_arguments("xy", [digests[0], [0, 0, 0]]) == ({"x": DISTINCT}, True)
    assert equal_arguments("xy", [(0, 0), (0, 0)]) == ({}, False)
