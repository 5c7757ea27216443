"""Rounding errors, second derivatives, weights on single anchors: against the formulas written out in float64."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.ranks.collectives import all_gather
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.catalogue import CATALOGUE
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EVERY_CASE, Value, close, drawn, error_message, local_shard, numbers
from tests.losses.whole_zoo import EVERY
from tests.test_extremes import Result, formula, nudged, ordinary
from tests.zoo import ZOO, Entry

pytestmark = pytest.mark.figures

LOSSES = [entry for entry in ZOO if entry.name in ("NTXent", "CLIP", "SupCon", "RowLoss, labels")]


def floating(rows: Sequence[Tensor]) -> list[Tensor]:
    return [x for x in rows if x.is_floating_point()]


def error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    return max((x.double() - y).abs().max().item() for x, y in zip(found, exact, strict=True))


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
INPUTS = {name: (dtype, False) for name, dtype in DTYPES.items()} | {"autocast": (torch.float32, True)}

OF_PAIRS = [x for x in EVERY if x.name in ("NTXent", "NTXent, three views", "SupCon", "Clip", "SigLIP")]
OF_DIFFERENCES = "CyclicConsistency", "RankNContrast"
NARROW = [name for name in INPUTS if name != "float32"]
EPS = torch.finfo(torch.float32).eps


Shape = tuple[int, int, float]  # samples, features, and the mean that is added to each feature
SMALL, NARROW_CONE = (12, 7, 0.0), (48, 16, 5.0)


def short_rows(entry: Entry, dtype: torch.dtype, shape: Shape = SMALL) -> list[Tensor]:
    """Of lengths around 1, so that losses of bare dot products are not saturated by them; or longer and nearly equal."""
    n, d, mean = shape
    return [(x / 4 + mean).to(dtype) if x.is_floating_point() else x for x in ordinary(entry, n, d)]


class Bound(NamedTuple):
    """What 32 bits may cost: twice the error of the dense formula in float32 on the same embeddings."""

    exact: Result
    of_value: float
    of_gradients: float

    @classmethod
    @functools.cache
    def of(cls, entry: Entry, dtype: torch.dtype, shape: Shape = SMALL, t: float = 0.1) -> "Bound":
        rows, last = short_rows(entry, dtype, shape), torch.finfo(dtype)
        wide = [x.double() if x.is_floating_point() else x for x in rows]
        exact, near = formula(entry, wide, t), formula(entry, nudged(wide, torch.float32), t)
        dense = formula(entry, rows, t, torch.float32)
        assert None not in (exact, near, dense)
        largest = max(x.abs().max().item() for x in exact.gradients)
        of_value, of_near = (error([x.value], [exact.value]) for x in (dense, near))
        of_gradients, of_near_gradients = (error(x.gradients, exact.gradients) for x in (dense, near))
        of_rounding = last.eps * (largest + last.smallest_normal)
        of_value = 2 * of_value + 4 * (of_near + EPS * exact.value.abs().item())
        return cls(exact, of_value, 2 * of_gradients + 4 * of_near_gradients + of_rounding)

    def check(self, result: Result) -> None:
        assert error([result.value], [self.exact.value]) <= self.of_value, "value"
        assert error(result.gradients, self.exact.gradients) <= self.of_gradients, "gradient"


def under_autocast(loss: Callable[..., Tensor], rows: Sequence[Tensor]) -> list[Result]:
    """With the backward pass after the block, and in it."""
    leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in rows]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(*leaves)
        inside = Result.of(loss, rows, torch.float32)
    return [Result(value.detach(), list(torch.autograd.grad(value, floating(leaves)))), inside]


def test_no_loss_is_left_out() -> None:
    tested = {entry.name.partition(",")[0].rstrip("+") for entry in EVERY}
    missing = {entry.cls for entry in CATALOGUE.values()} - tested
    assert not missing, f"{missing}: add a row with the loss's name to a table tests/losses/zoo_*.py"


@pytest.mark.parametrize(
    ("entry", "inputs", "shape", "temperature"),
    [
        *((x, y, SMALL, 0.1) for i, x in enumerate(EVERY) for j, y in enumerate(NARROW) if EVERY_CASE or i % 3 == j),
        *drawn(LOSSES, INPUTS, [(64, 64, 0.0), (48, 7, 0.0), (5, 2, 0.0)], [1.0, 0.1, 0.01], one_in=3),
        *((x, "float32", NARROW_CONE, 1.0) for x in EVERY if x.name.startswith(OF_DIFFERENCES)),
    ],
    ids=str,
)
def test_every_loss_costs_what_32_bits_cost(entry: Entry, inputs: str, shape: Shape, temperature: float) -> None:
    dtype, autocast = INPUTS[inputs]
    rows, bound = short_rows(entry, dtype, shape), Bound.of(entry, dtype, shape, temperature)

    def loss(*rows: Tensor) -> Tensor:
        value: Tensor = entry.make(temperature=temperature)(*rows)  # a new one: the centre of DINO's moves
        return value

    for result in under_autocast(loss, rows) if autocast else [Result.of(loss, rows, dtype)]:
        assert result.value.dtype == torch.float32
        assert {x.dtype for x in result.gradients} == {dtype}
        bound.check(result)


CONCATENATING = [lambda: cz.SwAV(3, 3), lambda: cz.MSN(3, 3), lambda: cz.CrossBatchMemory(cz.InfoNCE(), 8, 3)]
CONCATENATING += [lambda: cz.WeightedSum([cz.NTXent(), cz.NTXent(temperature=0.2)])]


@pytest.mark.parametrize("made", CONCATENATING)
def test_float16_may_come_under_autocast_to_bfloat16(made: Callable[[], Any], worlds: Worlds) -> None:
    """torch.cat refuses it then."""

    def job(autocast: bool) -> list[float]:
        torch.manual_seed(0)
        loss, views = cz.DistributedLoss(made()), numbers(2, 4, 3, seed=dist.get_rank()).half()
        with splitting(always=True), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return [loss(*views).item() for _ in range(2)]

    assert worlds.run(2, job, True) == worlds.run(2, job, False)


@pytest.mark.parametrize("entry", EVERY[:: 1 if EVERY_CASE else 2], ids=str)
def test_no_formula_in_16_bits_would_pass(entry: Entry) -> None:
    found = formula(entry, short_rows(entry, torch.bfloat16), 0.1, torch.bfloat16)
    if found is None:
        return  # it is not defined
    with pytest.raises(AssertionError, match=r"value|gradient"):
        Bound.of(entry, torch.bfloat16).check(found)


@pytest.mark.path("engines")
@pytest.mark.parametrize("entry", [x for x in EVERY if x.name in ("NTXent", "SupCon")], ids=str)
def test_products_of_long_embeddings_are_rounded_once(entry: Entry) -> None:
    """A softmax over logits of thousands is 0 or 1: it shows in which bits s_ij and s_ji of one tower differ."""
    loss, rows = entry.make(temperature=0.1, normalize=False), ordinary(entry, 24, 7)
    rows = [80 * x if x.is_floating_point() else x for x in rows]
    with cz.engine.plain_formulas():
        exact, plain = (Result.of(loss, rows, dtype).gradients for dtype in (torch.float64, torch.float32))
    found = Result.of(loss, rows, torch.float32).gradients
    assert error(found, exact) <= 2 * error(plain, exact)


@pytest.mark.path("engines")
@pytest.mark.parametrize("entry", [*LOSSES, *(x for x in EVERY if x.name == "CosFace")], ids=str)
def test_a_graph_may_be_kept_and_a_second_derivative_is_refused_with_the_fix(entry: Entry) -> None:
    loss, rows = entry.make(temperature=0.5).double(), ordinary(entry, 6, 3)
    rows = [x.requires_grad_(x.is_floating_point()) for x in rows]
    kept = torch.autograd.grad(loss(*rows), floating(rows), create_graph=True)
    for x, y in zip(kept, Result.of(loss, rows).gradients, strict=True):
        close(x.detach(), y)
    with pytest.raises(RuntimeError, match=r"contrastive_zoo\.engine\.plain_formulas\(\)"):
        kept[0].square().sum().backward()


def by_view(x: Tensor, shards: Sequence[int], views: int) -> list[Tensor]:
    """What each rank holds of the anchors, view after view."""
    return [part.flatten() for part in x.view(views, -1).split(list(shards), dim=1)]


@pytest.mark.parametrize("entry", LOSSES, ids=str)
@pytest.mark.parametrize("shards", [(5,), (3, 2), (0, 4, 1)], ids=str)
@pytest.mark.parametrize("dense", [False, True])
def test_losses_of_anchors_hand_each_rank_its_rows_gradient(entry: Entry, shards, dense, worlds: Worlds) -> None:
    """No factor of W: that is for the wrapper, which knows the trainer. The incoming gradient counts, anchor by anchor."""
    views, n, batch = 1 + (entry.name == "NTXent"), sum(shards), GlobalBatch((sum(shards),), d=3, seed=4)
    rows = batch.samples(2) if entry.call == "views" else [*batch.samples(), torch.arange(n) % 2]
    rows = [x.requires_grad_(x.is_floating_point()) for x in rows]

    def job(weight: Tensor) -> tuple[Tensor, list[Tensor]]:
        here = [local_shard(x, shards).requires_grad_(x.is_floating_point()) for x in rows]
        with cz.engine.plain_formulas() if dense else contextlib.nullcontext():
            value = entry.make(temperature=0.3, reduction="none").double()(*here, world=cz.World.of())
        return value, list(torch.autograd.grad(value, floating(here), weight.view_as(value)))

    anchors, weights = entry.dense(*rows, temperature=0.3, reduction="none"), numbers(views * n, seed=5)
    found = worlds.run(len(shards), job, each=[(weight,) for weight in by_view(weights, shards, views)])
    for (value, _), wanted in zip(found, by_view(anchors, shards, views), strict=True):
        close(value, wanted.detach())
    for index, gradient in enumerate(torch.autograd.grad((anchors * weights).sum(), floating(rows))):
        close(torch.cat([of_rank[index] for _, of_rank in found]), gradient)


@pytest.mark.parametrize(
    ("entry", "dtype", "ring"), drawn(OF_PAIRS, [torch.bfloat16, torch.float16], [True, False], one_in=2), ids=str
)
def test_16_bit_rows_are_summed_in_32_on_ranks(entry: Entry, dtype: torch.dtype, ring: bool, worlds: Worlds) -> None:
    """tests/test_explain.py counts the bytes that a ring sends of them."""
    shards, rows = (14, 10), short_rows(entry, dtype, (24, 16, 0.0))

    def gradients(loss: Callable[..., Tensor], rows: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return torch.cat(Result.of(loss, rows, dtype).gradients, 1).double()

    def job() -> Tensor:
        loss = cz.DistributedLoss(entry.make(temperature=0.1), grad_reduction="sum", ring=ring)
        with splitting(always=True):
            return gradients(loss, [local_shard(x, shards) for x in rows], dtype)

    dense = functools.partial(entry.dense, temperature=0.1)
    exact = gradients(dense, rows, torch.float64)
    errors = [(x - exact).norm() / exact.norm() for x in (torch.cat(worlds.run(2, job)), gradients(dense, rows, dtype))]
    assert not errors[0] > errors[1], errors  # float16 overflows in some formulas: NaN
    assert errors[0] <= 2 * torch.finfo(dtype).eps


LABELS = torch.tensor([0, 1, 0, 2, 1, 0])


def cubic(z: Tensor, labels: Tensor) -> Tensor:
    return (z @ z.T).pow(3).mean() + 0 * labels.sum()


SAMPLES = numbers(len(LABELS), 3, seed=1)


def penalised(value: Value, bare: Value, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    encoder = numbers(3, 4, seed=0).requires_grad_()
    z = x @ encoder
    with cz.engine.plain_formulas():
        (gradient,) = torch.autograd.grad(bare(z, labels), z, create_graph=True)
        penalty = (gradient.square().sum(1).sqrt() - 1).square().mean()
        first = value(z, labels)
    (first + penalty).backward()
    return (first + penalty).detach(), encoder.grad


BARE: dict[str, tuple[Value, Value]] = {
    "own": (cz.SupCon(), lambda z, labels: cz.SupCon()(z, labels, world=cz.World.of())),
    "third-party": (cubic, lambda z, labels: cubic(all_gather(z, gradient="complete"), all_gather(labels))),
}
"""A loss, and the same of all ranks' embeddings as the error of ``create_graph=True`` says to take it."""


@pytest.mark.parametrize("name", BARE)
def test_a_gradient_penalty_is_that_of_one_process(name: str, worlds: Worlds) -> None:
    loss, bare = BARE[name]

    def job() -> tuple[Tensor, Tensor]:
        half = slice(3 * dist.get_rank(), 3 * dist.get_rank() + 3)
        return penalised(cz.DistributedLoss(loss), bare, SAMPLES[half], LABELS[half])

    value, gradient = penalised(loss, loss, SAMPLES, LABELS)
    ranks = worlds.run(2, job)
    close(torch.stack([x for x, _ in ranks]).mean(), value)
    close(torch.stack([x for _, x in ranks]).mean(0), gradient)


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("name", BARE)
def test_gradients_for_a_trainer_are_not_differentiated_again(name: str, splits: bool, worlds: Worlds) -> None:
    def job() -> str | None:
        z = numbers(3, 4, seed=dist.get_rank()).requires_grad_()
        with splitting(always=splits):
            value = cz.DistributedLoss(BARE[name][0])(z, LABELS[:3])
            return error_message(lambda: torch.autograd.grad(value, z, create_graph=True))

    assert all("a penalty of them would be W² times too large" in (text or "") for text in worlds.run(2, job))
