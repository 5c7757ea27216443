"""Losses of positives on an accelerator: the host reads the largest number of positives once a step, or never."""

import copy
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.engine import tiling
from contrastive_zoo.engine.tiling import FEWEST_MATRICES
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.worlds import Worlds
from tests.simulated import device, on_cpu, put_by, value_and_gradients

LISTING: dict[str, Callable[..., nn.Module]] = {
    "soft": partial(cz.Triplet, soft=True),
    "semi-hard and soft": partial(cz.Triplet, soft=True, mining="semi-hard", margin=0.5),
    "SmoothAP": partial(cz.SmoothAP, temperature=0.3),
    "SmoothAP, with self": partial(cz.SmoothAP, temperature=0.3, with_self=True),
    "Angular": cz.Angular,
}
"""Losses whose work grows with the number of positives."""

MINED: dict[str, Callable[..., nn.Module]] = {
    f"{mining}, {average}, {margin}": partial(
        cz.Triplet, mining=mining, average=average, margin=margin, metric="similarity"
    )
    for mining, average, margin in [("all", "nonzero", 1.0), ("all", "all", 0.5), ("semi-hard", "nonzero", 1.0)]
}


def batch(n: int = 13, classes: int = 4) -> list[Tensor]:
    """Return embeddings and labels of classes of different size; the last one's class has no other."""
    draw = torch.Generator().manual_seed(n)
    labels = torch.randint(0, classes, (n,), generator=draw) * torch.randint(0, 2, (n,), generator=draw)
    labels[-1] = classes
    return [torch.randn(n, 4, dtype=torch.float64, generator=draw), labels]


def with_ties(n: int) -> list[Tensor]:
    """Return embeddings of which similarities are −1, 0 or 1: a margin of 1 is where a triplet ceases to count."""
    _, labels = batch(n)
    draw = torch.Generator().manual_seed(n)
    signs = torch.randint(0, 2, (n, 1), generator=draw) * 2 - 1
    return [torch.eye(3, dtype=torch.float64)[torch.randint(0, 3, (n,), generator=draw)] * signs, labels]


def on_accelerator(loss: nn.Module, rows: list[Tensor]) -> tuple[list[Any], list[str]]:
    n = len(rows[0])
    with device() as mode, cz.engine.memory_budget(1), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiling, "TILE_BYTES", FEWEST_MATRICES * 8 * n * -(-n // 3))
        put = put_by(mode)
        loss_fn = cz.DistributedLoss(put(loss), check_finite=False)
        found = value_and_gradients(loss_fn, [put(x) for x in rows])
        reads = list(mode.reads)
        return on_cpu(found), reads


@pytest.mark.parametrize(("name", "n"), [*zip(MINED, [13, 150, 13], strict=True)])
def test_triplets_are_counted_without_a_read(name: str, n: int) -> None:
    rows = with_ties(n)
    found, reads = on_accelerator(MINED[name](), rows)
    assert not reads
    assert_equal_to_formula(found, MINED[name](), rows)


def assert_equal_to_formula(found: list[Any], loss: nn.Module, rows: list[Tensor]) -> None:
    torch.testing.assert_close(found, value_and_gradients(loss, rows), rtol=1e-10, atol=1e-10)
    with cz.engine.plain_formulas():
        torch.testing.assert_close(found, value_and_gradients(loss, rows), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("name", "reduction"), [*zip(LISTING, cycle(["mean", "none"]), strict=False)])
def test_the_number_of_positives_is_read_once(name: str, reduction: str) -> None:
    loss = LISTING[name](reduction=reduction)
    found, reads = on_accelerator(loss, batch())
    assert reads == ["read_later"]
    assert_equal_to_formula(found, loss, batch())


def test_positives_in_a_memory() -> None:
    loss = cz.CrossBatchMemory(cz.Triplet(soft=True), 20, 4, dtype=torch.float64)
    expected = [value_and_gradients(kept, batch(n)) for kept in [copy.deepcopy(loss)] for n in (13, 9)]
    with device() as mode:
        put = put_by(mode)
        kept = put(loss)
        found = [on_cpu(value_and_gradients(kept, [put(x) for x in batch(n)])) for n in (13, 9)]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_ranks_read_the_number_of_their_own_anchors(device_worlds: Worlds) -> None:
    def job(*rows: Tensor) -> list[tuple[list[Any], int]]:
        found = []
        for make in LISTING.values():
            with device() as mode, splitting(always=True):
                put = put_by(mode)
                loss = cz.DistributedLoss(make(), check_finite=False, check_equal=False)
                values = on_cpu(value_and_gradients(loss, [put(x) for x in rows]))
                found.append((values, mode.reads.count("read_later")))
        return found

    for sizes in ((5, 8), (0, 13)):  # a rank without an anchor reads nothing
        each = list(zip(*(x.split(sizes) for x in batch()), strict=True))
        by_rank = device_worlds.run(2, job, each=each)
        for index, make in enumerate(LISTING.values()):
            value, gradient = value_and_gradients(make(), batch())
            for (found, reads), local in zip([x[index] for x in by_rank], gradient.split(sizes), strict=True):
                assert reads == min(1, len(local))
                torch.testing.assert_close(found, [value, 2 * local], rtol=1e-10, atol=1e-10)
