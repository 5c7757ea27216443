"""Kernels that a step launches, counted on any rank of any number: what a launch does is not run here."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from contrastive_zoo.engine.exchange import GatherExchange, schedule
from contrastive_zoo.engine.precision import MIN_NORM
from contrastive_zoo.engine.sigmoid import parts_of_kernels
from contrastive_zoo.engine.softmax_arithmetic import statistics
from contrastive_zoo.engine.softmax_sweep import Partners, Pass, Totals
from contrastive_zoo.ranks.world import Shards, World

pytest.importorskip("triton")

from contrastive_zoo.engine import softmax_kernels
from contrastive_zoo.engine.kernels import blocks, sigmoid, softmax

ROWS, WIDTH = 600, 8
MOST = 12


class Counted:
    def __init__(self, launches: list[str], name: str) -> None:
        self.launches, self.name = launches, name

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *arguments, **options: self.launches.append(self.name)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Count launches of large batches, whose tiles with masks have a launch of their own, on a rank by itself."""
    names: list[str] = []
    kernels = [(softmax, ("log_sum_exps", "merge", "softmax_weights")), (sigmoid, ("sigmoid_pairs",))]
    for module, of_module in kernels:
        for name in of_module:
            monkeypatch.setattr(module, name, Counted(names, name))
    monkeypatch.setattr(blocks, "_capability", lambda device: 90)
    monkeypatch.setattr(blocks, "SINGLE_LAUNCH_PAIRS", 0)
    monkeypatch.setattr(
        softmax_kernels, "gather_rows", lambda rows, shards, world: rows.new_zeros(shards.total, rows.shape[1])
    )
    monkeypatch.setattr(softmax_kernels, "merge_at_owners", lambda total, *rest: total)
    return names


def exchange_of(shards: Shards, rows: Tensor, *, half: bool) -> GatherExchange:
    return GatherExchange(
        rows, schedule(shards, shards, half=half), shards, World(), gathered=rows.new_zeros(shards.total, WIDTH)
    )


def softmax_step(shards: Shards, *, one_tower: bool) -> None:
    rows, scale = torch.zeros(shards.size, WIDTH), torch.tensor(10.0)
    offset = shards.size // 2 if one_tower else 0
    factors = rows.bfloat16(), rows.bfloat16()
    sweep = softmax_kernels.KernelSweep(
        row_shards=shards, column_shards=shards, world=World(), unit_norm=True, learnable_scale=True, factors=factors,
        partners=Partners((offset,)), one_tower=one_tower,
    )  # fmt: skip
    exchange = exchange_of(shards, rows, half=one_tower)
    arguments = Pass(sweep.exact_sums, rows, exchange, scale)
    r, c, _ = sweep.sums(arguments, None)
    of_rows, of_columns = (statistics(x, x[:, 0]) for x in (r, r if c is None else c))
    drows = torch.empty_like(rows)
    totals = Totals(drows, drows if one_tower else torch.empty_like(rows), rows.new_zeros(()))
    assert len(list(sweep.gradients(arguments, (of_rows, of_columns), totals, None))) == len(exchange.blocks) - 1


def sigmoid_step(shards: Shards) -> None:
    rows, number = torch.zeros(shards.size, WIDTH), torch.ones(())
    block = sigmoid.KernelBlock(rows, number, number, True, MIN_NORM, torch.bfloat16)
    exchange = exchange_of(shards, rows, half=False)
    assert len(list(parts_of_kernels(block, exchange, torch.zeros_like(rows)))) == len(exchange.blocks) - 1


STEPS: dict[str, Callable[[Shards], None]] = {
    "CLIP": lambda shards: softmax_step(shards, one_tower=False),
    "NTXent": lambda shards: softmax_step(shards, one_tower=True),
    "SigLIP": sigmoid_step,
}


def most(step: Callable[[Shards], None], launches: list[str], ranks: int) -> int:
    counts = []
    for rank in range(ranks):
        launches.clear()
        step(Shards((ROWS,) * ranks, rank))
        counts.append(len(launches))
    return max(counts)


@pytest.mark.parametrize("loss", STEPS)
def test_no_more_launches_on_more_ranks(loss: str, launches: list[str]) -> None:
    for ranks in (1, 2, 3, 8):
        assert 0 < most(STEPS[loss], launches, ranks) <= MOST, ranks


def test_launches_for_each_rank_would_be_counted(launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def by_rank(self: GatherExchange, prepare: Callable[[Tensor], Tensor]) -> Any:
        return (([block], prepare(x)) for block, x in zip(self.blocks, self, strict=True))

    monkeypatch.setattr(GatherExchange, "windows", by_rank)
    assert most(STEPS["CLIP"], launches, 8) > 5 * MOST
