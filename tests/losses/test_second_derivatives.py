"""Under ``plain_formulas()`` every loss can be differentiated twice and more: against its definition in plain torch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.losses.cross_batch_memory import CrossBatchMemory
from contrastive_zoo.losses.triplet import Triplet
from tests.helpers import close, numbers
from tests.losses.whole_zoo import EVERY
from tests.zoo import Entry

LABELS = torch.tensor([0, 1, 0, 2, 1, 0])


def rows(entry: Entry) -> list[Tensor]:
    views = entry.views if entry.call == "views" else 1
    return [numbers(len(LABELS), 3, seed=3 + view).requires_grad_() for view in range(views)]


def derivative(value: Tensor, at: list[Tensor]) -> Tensor:
    """⟨∂L, v⟩ for some v, to be differentiated again."""
    gradients = torch.autograd.grad(value, at, create_graph=True)
    along = [numbers(*x.shape, seed=20 + i) for i, x in enumerate(at)]
    return torch.stack([(g * v).sum() for g, v in zip(gradients, along, strict=True)]).sum()


def called(entry: Entry, loss: Callable[..., Tensor], at: list[Tensor]) -> Tensor:
    return loss(*at, LABELS) if entry.call == "labels" else loss(*at)


@pytest.mark.parametrize("outside", [False, True], ids=["inside", "outside"])
@pytest.mark.parametrize("entry", EVERY, ids=str)
def test_second_derivatives_are_those_of_the_definition(entry: Entry, outside: bool) -> None:
    """Also where the context has been left before the second is taken."""
    at, loss = rows(entry), entry.make(temperature=0.5).double()
    with cz.engine.plain_formulas():
        first = derivative(called(entry, loss, at), at)
        found = torch.autograd.grad(first, at, retain_graph=True)
    if outside:
        found = torch.autograd.grad(first, at)
    expected = derivative(called(entry, lambda *x: entry.dense(*x, temperature=0.5), at), at)
    for x, y in zip(found, torch.autograd.grad(expected, at), strict=True):
        close(x, y, 1e-9 if entry.name.startswith("SwAV") else 1e-10)


ONE_BY_ONE = [entry for entry in EVERY if entry.name in ("Angular", "SmoothAP", "Triplet, soft")]


@pytest.mark.parametrize("entry", ONE_BY_ONE, ids=str)
def test_positives_one_at_a_time_have_the_third_derivative_of_the_definition(entry: Entry) -> None:
    """Their terms are computed again for each order."""
    (z,) = at = rows(entry)

    def third(value: Tensor) -> Tensor:
        return torch.autograd.grad(derivative(derivative(value, at), at), z)[0]

    loss = entry.make().double()
    with cz.engine.plain_formulas():
        found = third(loss(z, LABELS))
    close(found, third(entry.dense(z, LABELS, temperature=1.0)))


def test_the_zoo_has_the_losses_that_take_one_positive_at_a_time() -> None:
    assert len(ONE_BY_ONE) == 3


def test_a_memory_has_second_derivatives() -> None:
    z = numbers(6, 3, seed=1).requires_grad_()
    memory = CrossBatchMemory(Triplet(soft=True), 8, 3, dtype=torch.float64)
    with cz.engine.plain_formulas():
        (gradient,) = torch.autograd.grad(memory(z, LABELS), z, create_graph=True)
        (second,) = torch.autograd.grad(gradient.square().sum(), z)
    assert second.isfinite().all()
    assert second.abs().max() > 0
