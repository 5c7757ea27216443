"""Kernels that a step launches, counted on any rank of any number: what a launch does is not run here."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import contrastive_zoo as cz
from contrastive_zoo.engine import kernels
from contrastive_zoo.engine.exchange import GatherExchange
from contrastive_zoo.testing.interventions import splitting
from tests.counted import counted

pytest.importorskip("triton")

from contrastive_zoo.engine.kernels import blocks, sigmoid, softmax

ROWS, WIDTH = 600, 8
MOST = 12
LOSSES: dict[str, Callable[[], Any]] = {"CLIP": cz.Clip, "NTXent": cz.NTXent, "SigLIP": cz.SigLIP}


class Counted:
    def __init__(self, launches: list[str], name: str) -> None:
        self.launches, self.name = launches, name

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *arguments, **options: self.launches.append(self.name)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Count launches of large batches, whose tiles with masks have a launch of their own."""
    names: list[str] = []
    of_modules = [(softmax, ("log_sum_exps", "merge", "softmax_weights")), (sigmoid, ("sigmoid_pairs",))]
    for module, of_module in of_modules:
        for name in of_module:
            monkeypatch.setattr(module, name, Counted(names, name))
    for problem in ("device_problem", "installation_problem"):
        monkeypatch.setattr(kernels, problem, lambda device: None)
    monkeypatch.setattr(blocks, "_capability", lambda device: 90)
    monkeypatch.setattr(blocks, "SINGLE_LAUNCH_PAIRS", 0)
    return names


def most(name: str, launches: list[str], ranks: int) -> int:
    counts = []
    for rank in {0, ranks // 2, ranks - 1}:
        launches.clear()
        rows = [torch.randn(ROWS, WIDTH).bfloat16().requires_grad_() for _ in range(2)]
        with splitting(always=True), cz.engine.use_implementation("triton"):
            counted(cz.DistributedLoss(LOSSES[name](), check_distinct=False), rows, [ROWS] * ranks, rank)
        counts.append(len(launches))
    return max(counts)


@pytest.mark.parametrize("name", LOSSES)
def test_no_more_launches_on_more_ranks(name: str, launches: list[str]) -> None:
    for ranks in (1, 3, 8):
        assert 0 < most(name, launches, ranks) <= MOST, ranks


def test_launches_for_each_rank_would_be_counted(launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def by_rank(self: GatherExchange, prepare: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        return (([block], prepare(x)) for block, x in zip(self.blocks, self, strict=True))

    monkeypatch.setattr(GatherExchange, "windows", by_rank)
    assert most("CLIP", launches, 8) > 5 * MOST
