"""The parts of a row-wise loss equal their plain formulas: by hand, from sparse gradients, in blocks of any height."""

import contextlib
import gc
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.engine import anchor_block, hinges, implementation, masked, pairwise, tiling
from contrastive_zoo.engine.anchor_block import BatchLayout, class_numbers, only_positives
from contrastive_zoo.ranks import devices
from contrastive_zoo.ranks.world import Shards, World
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import close, numbers
from tests.simulated import value_and_gradients

Pass = Callable[..., Tensor]

OF_ROWS: dict[str, Pass] = {
    "dot_products": pairwise.dot_products,
    "distances": pairwise.distances,
    "squared distances": lambda a, b: pairwise.distances(a, b, squared=True),
}


def assert_plain(function: Pass, *inputs: Tensor, weights: Tensor | None = None) -> None:
    """Value and gradient of the plain formula; weights are those of the results."""

    def outcome() -> list[Tensor]:
        leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
        found = function(*leaves)
        w = numbers(*found.shape, seed=9) if weights is None else weights
        learnt = [x for x in leaves if x.requires_grad]
        return [found.detach(), *torch.autograd.grad(found.where(found.abs() < torch.inf, 0), learnt, w)]

    with cz.engine.plain_formulas():
        expected = outcome()
    for x, y in zip(outcome(), expected, strict=True):
        assert torch.equal(x.isinf(), y.isinf())
        close(x.masked_fill(x.isinf(), 0), y.masked_fill(y.isinf(), 0))


def matrix() -> tuple[Tensor, Tensor]:
    """[6, 7] with ties and numbers beyond exp, and a mask that marks nothing, all, or some of a row."""
    x = numbers(6, 7, seed=0).mul(2).round()
    x[1] = torch.tensor([-3.0, 0, 5, -3, 5, 1, 5])
    x[3] *= 400
    mask = numbers(6, 7, seed=1) > 0
    mask[0], mask[1] = False, True
    return x, mask


@pytest.mark.parametrize("function", [masked.masked_log_sum_exp, masked.masked_max, masked.masked_min])
def test_a_pass_is_its_plain_formula(function: Pass) -> None:
    assert_plain(function, *matrix())


def alike() -> tuple[Tensor, Tensor]:
    """Rows [5, 2] and [33, 2], some of which are the same points."""
    a, b = numbers(5, 2, seed=2), numbers(33, 2, seed=3)
    b[:2] = a[1]
    return a, b


def sparse_gradient(places: int) -> Tensor:
    w = torch.zeros(5, 33, dtype=torch.float64)
    w.view(-1)[numbers(165, seed=4).topk(places).indices] = numbers(places, seed=5)
    w[1, 0] = 3.0
    return w


@pytest.mark.parametrize("places", [0, 20, 165])
@pytest.mark.parametrize("name", OF_ROWS)
def test_products_and_distances_are_their_plain_formula(name: str, places: int, monkeypatch) -> None:
    """Value and gradient are equal for dense and for sparse gradients."""
    asked: list[bool] = []
    question = pairwise._is_sparse_enough
    monkeypatch.setattr(pairwise, "_is_sparse_enough", lambda *of: (asked.append(question(*of)), asked[-1])[1])
    assert_plain(OF_ROWS[name], *alike(), weights=sparse_gradient(places))
    assert asked == [places < 165]
    assert_plain(OF_ROWS[name], alike()[0][:0], alike()[1], weights=sparse_gradient(places)[:0])


def test_near_points_have_their_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matmul alone rounds 1e-5 to four digits, otherwise in each split over ranks; which is the mutant."""
    a = numbers(3, 2, seed=0)
    b = torch.cat([a + 1e-5 * numbers(3, 2, seed=1), numbers(3, 2, seed=2), a])
    expected = (a[:, None] - b).norm(dim=-1)

    def error() -> float:
        return (pairwise.distances(a, b) / expected - 1).nan_to_num().abs().max().item()

    assert error() < 1e-12
    monkeypatch.setattr(pairwise, "_PAIRS_AT_ONCE", 2)
    assert error() < 1e-12
    monkeypatch.setattr(pairwise, "_NEAR", 0)
    assert error() > 1e-10


@pytest.mark.parametrize("name", OF_ROWS)
def test_pairs_and_all_others_together(name: str) -> None:
    """An extreme's gradient is added to that of other functions of the matrix, also of one that was changed in place."""
    function = OF_ROWS[name]

    def of(a: Tensor, b: Tensor) -> Tensor:
        distance = function(a, b if implementation.is_dense() else pairwise.share_across_blocks(b))
        found = masked.masked_max(distance, distance.detach() < 9) + distance.sum(1)
        if name == "dot_products":  # distances are needed as they are
            distance.clamp_(max=2)
        return found + masked.masked_min(distance, distance.detach() > 0).clamp(max=9)

    a, b = alike()
    assert_plain(lambda a: of(a, b), a)


@pytest.mark.parametrize("context", [contextlib.nullcontext, cz.engine.plain_formulas])
def test_the_first_of_equals_gets_the_gradient(context: Any) -> None:
    x = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0]], requires_grad=True)
    every = torch.ones(2, 4, dtype=torch.bool)
    expected = {masked.masked_max: [[1, 0, 0, 0], [0, 1, 0, 0]], masked.masked_min: [[0, 0, 1, 0], [1, 0, 0, 0]]}
    for extreme, gradient in expected.items():
        with context():
            (g,) = torch.autograd.grad(extreme(x, every, first=True).sum(), x)
        assert g.tolist() == gradient


@pytest.mark.parametrize("mining", ["all", "semi-hard"])
@pytest.mark.parametrize("classes", [1, 3, 9, 24])
def test_a_search_and_one_bar_after_another_find_the_same(mining: Any, classes: int, monkeypatch) -> None:
    z, labels = numbers(24, 3, seed=1), torch.arange(24) % classes
    z[5] = z[2]  # equal distances
    loss = cz.Triplet(mining=mining, margin=0.4)
    one_by_one = value_and_gradients(loss, [z, labels])
    monkeypatch.setattr(hinges, "_SEARCH_THRESHOLDS", -1)
    for x, y in zip(value_and_gradients(loss, [z, labels]), one_by_one, strict=True):
        close(x, y)


def test_a_block_is_as_high_as_the_budget_allows() -> None:
    def height() -> int:
        return next(iter(anchor_block.anchor_slices(torch.empty(2048, 2), 2048))).stop

    usual = height()
    assert usual * 2048 * 4 * tiling.MATRICES_PER_BLOCK == tiling.BLOCK_BYTES
    with cz.engine.memory_budget(tiling.BLOCK_BYTES // 4):
        assert height() == usual // 4
    with cz.engine.memory_budget(0):  # not row by row
        assert height() == tiling.LOW_BLOCK


@pytest.mark.parametrize("make", [lambda: cz.Triplet(mining="hard"), cz.Contrastive], ids=["at once", "afterwards"])
def test_nothing_is_held_once_the_backward_pass_is_done(make) -> None:
    """Gradients, gathered rows and inputs go with the graph, whoever still holds the value; not if it is retained."""
    z = numbers(64, 8, seed=0).requires_grad_()
    value = make()(z * 1, torch.arange(64) % 8)
    (expected,) = torch.autograd.grad(value, z, retain_graph=True)
    held = held_rows(value)
    assert held
    (again,) = torch.autograd.grad(value, z, retain_graph=True)
    close(again, expected)
    assert len(held_rows(value)) == len(held)
    (last,) = torch.autograd.grad(value, z)
    close(last, expected)
    del held, again, last, expected
    gc.collect()
    assert not held_rows(value)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(value, z)


def held_rows(value: Tensor) -> list[Tensor]:
    found, nodes = [], [value.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        nodes += [x for x, _ in node.next_functions]
        held = [*getattr(node, "__dict__", {}).values()]
        with contextlib.suppress(RuntimeError):
            held += getattr(node, "saved_tensors", ())
        inside = [y for x in held for y in ([*vars(x).values()] if type(x).__name__ == "RowwiseSweep" else [x])]
        flat = [y for x in inside for y in (x if isinstance(x, (list, tuple)) else [x])]
        found += [x for x in flat if isinstance(x, Tensor) and x.numel() >= 64 * 8]
    return found


IDS = st.lists(st.sampled_from([-(2**63), -1, 0, 1, 2**60, 2**60 + 1, 2**63 - 1]), max_size=12)


@given(ids=IDS)
def test_an_accelerator_numbers_classes_as_a_cpu(ids: list[int]) -> None:
    x = torch.tensor(ids, dtype=torch.int64)
    classes, counts = class_numbers(x)
    partners = only_positives(classes, counts)
    with patch.object(devices, "on_cpu", lambda x: False):
        found, found_counts = class_numbers(x)
        found_partners = only_positives(found, found_counts)
    assert torch.equal(found, classes)
    assert found_counts.tolist() == counts.tolist() + [0] * (len(ids) - len(counts))
    assert torch.equal(found_partners, torch.arange(len(ids)) if partners is None else partners)
    layout = BatchLayout(x, x, (), Shards((len(ids),)), World(), None)
    assert [of.tolist() for of in layout._ids_as_floats] == [classes.tolist()] * 2


class Tagged(Tensor):
    """As fastai's TensorBase and MONAI's MetaTensor, which encoders pass on."""


HARD = cz.Triplet(mining="hard"), cz.Triplet(mining="hard", reduction="none"), cz.Margin(num_classes=2)


@pytest.mark.parametrize("loss", [*HARD, cz.MegaBatchMargin()], ids=str)
def test_embeddings_may_be_of_a_subclass(loss: Any, worlds: Worlds) -> None:
    """A sparse gradient cannot be of one."""

    def job(kind: type[Tensor]) -> Tensor:
        z = numbers(5, 3, seed=dist.get_rank()).as_subclass(kind).requires_grad_()
        others = 2 * z if isinstance(loss, cz.MegaBatchMargin) else torch.arange(5).as_subclass(kind) % 2
        cz.DistributedLoss(loss)(z, others).sum().backward()
        return z.grad.as_subclass(Tensor)

    torch.testing.assert_close(worlds.run(2, job, Tagged), worlds.run(2, job, Tensor))
