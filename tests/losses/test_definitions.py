"""Every loss of the tables is its definition in plain torch on one process, by every path, and twice differentiated."""

import contextlib
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.engine import tiling
from contrastive_zoo.ranks import devices
from contrastive_zoo.testing.batch import GlobalBatch, global_batches
from tests.helpers import EVERY_CASE, TEMPERATURES, assert_same, close, drawn, numbers
from tests.losses.whole_zoo import EVERY
from tests.zoo import Entry

every_loss = pytest.mark.parametrize("entry", EVERY, ids=str)

PATHS: dict[str, Callable[[], Any]] = {
    "engine": contextlib.nullcontext,
    "low blocks": lambda: patch.multiple(tiling, BLOCK_BYTES=500, TILE_BYTES=500),
    "plain formulas": cz.engine.plain_formulas,
    "accelerator": lambda: patch.object(devices, "on_cpu", lambda x: False),
}
ODD = [
    GlobalBatch((9,), d=5, labels="singletons", seed=1),
    GlobalBatch((4,), d=2, labels="same", seed=2),
    GlobalBatch((5,), d=1, labels="distinct", seed=3),
    GlobalBatch((1,), d=3, seed=4),
]


def rows_of(entry: Entry, batch: GlobalBatch) -> list[Tensor]:
    views = entry.views if entry.call == "views" else 1
    rows = [numbers(batch.total, batch.d, seed=10 * batch.seed + view).requires_grad_() for view in range(views)]
    return rows if entry.call == "views" else [*rows, batch.classes()]


@every_loss
@given(batch=global_batches((1,)), temperature=TEMPERATURES, path=st.sampled_from(list(PATHS)))
def test_a_loss_is_its_definition(entry: Entry, batch: GlobalBatch, temperature: float, path: str) -> None:
    with PATHS[path]():
        loss = entry.make(temperature=temperature).double()
        assert_same(loss, partial(entry.dense, temperature=temperature), *rows_of(entry, batch))


@every_loss
def test_a_loss_of_an_odd_batch_is_its_definition(entry: Entry) -> None:
    """Each batch by a path that depends on the loss; by every path in a search."""
    for (i, batch), (j, path) in itertools.product(enumerate(ODD), enumerate(PATHS)):
        if EVERY_CASE or (EVERY.index(entry) + i + j) % len(PATHS) == 0:
            test_a_loss_is_its_definition.hypothesis.inner_test(entry, batch, 0.2, path)


def derivative(value: Tensor, at: list[Tensor]) -> Tensor:
    """⟨∂L, v⟩ for some v, to be differentiated again."""
    gradients = torch.autograd.grad(value, at, create_graph=True)
    return sum(((g * numbers(*g.shape, seed=20 + i)).sum() for i, g in enumerate(gradients)), torch.zeros(()))


@pytest.mark.parametrize(("entry", "outside"), drawn(EVERY, [False, True], one_in=2), ids=str)
def test_second_derivatives_are_those_of_the_definition(entry: Entry, outside: bool) -> None:
    """Under plain_formulas(), also where the context has been left before the second is taken."""
    rows, loss = rows_of(entry, GlobalBatch((6,), d=3, seed=3)), entry.make(temperature=0.5).double()
    at = [x for x in rows if x.requires_grad]
    with cz.engine.plain_formulas():
        first = derivative(loss(*rows), at)
        found = torch.autograd.grad(first, at, retain_graph=True)
    if outside:
        found = torch.autograd.grad(first, at)
    expected = torch.autograd.grad(derivative(entry.dense(*rows, temperature=0.5), at), at)
    for x, y in zip(found, expected, strict=True):
        close(x, y, 1e-9 if entry.name.startswith("SwAV") else 1e-10)


ADDITIVE = [x for x in EVERY if hasattr(x.make(temperature=0.5), "reduction") and x.name != "OnlineContrastive"]


@pytest.mark.parametrize("entry", ADDITIVE, ids=str)
def test_losses_of_anchors_add_up_to_the_sum(entry: Entry) -> None:
    def made(reduction: str) -> Any:
        return entry.make(temperature=0.5, reduction=reduction).double()

    rows, nu_beta = rows_of(entry, ODD[0]), 0.125 if entry.name == "Margin" else 0.0
    assert made("none")(*rows).ndim == 1
    assert_same(lambda *x: made("none")(*x).sum() + nu_beta, made("sum"), *rows)


@pytest.mark.parametrize("entry", [x for x in EVERY if x.call == "labels"], ids=str)
def test_two_views_are_labelled_rows(entry: Entry) -> None:
    loss, rows = entry.make(temperature=0.5).double(), rows_of(entry, GlobalBatch((8,), d=5))[0]
    if isinstance(loss, cz.RowLoss) and not (isinstance(loss, cz.LiftedStructure) or getattr(loss, "num_classes", 0)):
        close(loss(*rows.chunk(2)), loss(rows, torch.arange(4).repeat(2)))


def test_numbers_of_hard_pairs_by_hand() -> None:
    """A mean, and the losses of single pairs, which the table of definitions does not have."""
    eye = torch.eye(2, dtype=torch.float64)
    mean = cz.OnlineContrastive(reduction="mean")(eye, eye[[0, 0]], torch.tensor([1, 1]))  # of 0 and 1 > ½: 1² alone
    close(mean, torch.tensor(1.0).double())
    each = cz.OnlineContrastive(reduction="none")(eye, eye[[0, 0]], torch.tensor([1, 0]))
    close(each, torch.zeros(2).double())
