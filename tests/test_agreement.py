"""What ranks compare and what not: names, orders of calls, draws and errors; tests/random_steps has the differences."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import drawn, numbers, refused


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


class Powered(nn.Module):
    """A loss whose attribute has the name of an option, and whose parameter has that of an argument."""

    def __init__(self, grad_reduction: str, scale: float) -> None:
        super().__init__()
        self.grad_reduction, self.scale = grad_reduction, nn.Parameter(torch.tensor(scale, dtype=torch.float64))

    def forward(self, embeddings: Tensor, scale: Tensor) -> Tensor:
        return (scale * self.scale * embeddings).square().sum()


@pytest.mark.parametrize(
    ("difference", "words"), [({"grad_reduction": "b"}, "the loss's grad_reduction"), ({"scale": 3.0}, "parameters")]
)
def test_a_name_that_an_option_or_an_argument_has_hides_nothing(
    difference: dict[str, Any], words: str, worlds: Worlds
) -> None:
    def bad() -> None:
        rank = dist.get_rank()
        loss = Powered(**{"grad_reduction": "a", "scale": 2.0, **(difference if rank else {})})
        cz.DistributedLoss(loss)(numbers(3, 2, seed=rank), torch.tensor(0.5))

    refused(worlds, 2, bad, words)


def test_a_setting_that_draws_is_refused_in_words(worlds: Worlds) -> None:
    class Drawn(nn.Module):
        def forward(self) -> Tensor:
            return 0.1 + torch.rand((), dtype=torch.float64)

    def bad() -> None:
        torch.manual_seed(dist.get_rank())
        cz.DistributedLoss(cz.SupCon(temperature=Drawn()))(numbers(3, 2, seed=dist.get_rank()), torch.tensor([0, 1, 0]))

    words = "temperature has norm … A module that is a setting must return the same number on every rank"
    refused(worlds, 2, bad, words)


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
    "CrossBatchMemory": lambda: cz.CrossBatchMemory(Raises(), 16, 5, dtype=torch.float64),
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


@pytest.mark.parametrize(("name", "splits"), drawn(list(RAISING), (False, True), one_in=1))
def test_a_rank_that_raises_and_goes_on_closes_the_group(name: str, splits: bool, worlds: Worlds) -> None:
    """Never an abort or a value of another step. A memory moves on all ranks or on none, so all of them hear it."""
    kind = KeyboardInterrupt if name == "RowLoss" else RuntimeError
    zero, one = worlds.run(2, goes_on, name, splits, kind)
    assert zero[0] == one[0] == ("", "")
    if name == "CrossBatchMemory" and not splits:
        assert zero == one
        assert zero[1] == ("ValueError", "CrossBatchMemory: rank 1: RuntimeError: in the middle.")
        assert zero[2:] == [("", "")] * 2
        return
    assert one[1][0] == kind.__name__
    for ends in (zero[2:], one[2:]):
        for how, text in ends:
            assert how == "CommunicationError"
            assert f"Rank 1 failed in {text.partition(',')[0]}, call 2: {kind.__name__}" in text
            assert "in the middle" in text


class Renamed(cz.MNRL):
    def inputs(self, q: Tensor, documents: Tensor, negatives: Tensor, owners: Tensor) -> Any:
        return super().inputs(q, documents, negatives, owners)


@pytest.mark.parametrize(
    ("make", "wrap", "owner", "words"),
    [
        (cz.MNRL, lambda x: x, 2, "owners are rows of this rank's 2"),
        (cz.MNRL, lambda x: cz.WeightedSum([x]), 1, "indices of local rows do not allow"),
        (Renamed, lambda x: x, 1, "inputs() has no argument 'queries', which row_indices names"),
    ],
)
def test_indices_that_no_rank_can_interpret_where_a_loss_has_a_hook(
    make: Any, wrap: Any, owner: int, words: str, worlds: Worlds
) -> None:
    def bad() -> None:
        loss = make()
        loss.register_forward_hook(lambda module, args, value: value)
        rows = [numbers(2, 4, seed=3 * index + dist.get_rank()) for index in range(3)]
        cz.DistributedLoss(wrap(loss))(*rows, torch.tensor([0, owner if dist.get_rank() else 1]))

    refused(worlds, 2, bad, words)


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


def test_under_autocast_a_wrapper_that_one_rank_made_again_holds_the_same_numbers(worlds: Worlds) -> None:
    """Its first call looks closely, the other rank's does not; θ = 1.0039 is halfway between two numbers of bfloat16."""

    def job() -> list[float]:
        torch.manual_seed(dist.get_rank())
        loss = cz.NTXent(temperature=cz.LearnableTemperature(0.36645))
        wrapper = cz.DistributedLoss(loss)
        values = []
        for step in range(2):
            if step == 1 and dist.get_rank() == 1:
                wrapper = cz.DistributedLoss(loss)
            with torch.autocast("cpu", torch.bfloat16):
                values.append(float(wrapper(torch.randn(3, 4), torch.randn(3, 4))))
        return values

    first, second = worlds.run(2, job)
    assert first == second
