"""Kernels that a step launches, counted on any rank of any number: what a launch does is not run here."""

from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

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


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Count launches of large batches, whose tiles with masks have a launch of their own."""
    kernel = MagicMock()
    for name in ("log_sum_exps", "merge", "softmax_weights"):
        monkeypatch.setattr(softmax, name, kernel)
    monkeypatch.setattr(sigmoid, "sigmoid_pairs", kernel)
    for problem in ("device_problem", "installation_problem"):
        monkeypatch.setattr(kernels, problem, lambda device: None)
    monkeypatch.setattr(blocks, "_capability", lambda device: 90)
    monkeypatch.setattr(blocks, "SINGLE_LAUNCH_PAIRS", 0)
    return kernel.__getitem__.return_value


def most(name: str, launches: Any, ranks: int) -> int:
    counts = []
    for rank in {0, ranks // 2, ranks - 1}:
        launches.reset_mock()
        rows = [torch.randn(ROWS, WIDTH).bfloat16().requires_grad_() for _ in range(2)]
        with splitting(always=True), cz.engine.use_implementation("triton"):
            counted(cz.DistributedLoss(LOSSES[name](), check_distinct=False), rows, [ROWS] * ranks, rank)
        counts.append(launches.call_count)
    return max(counts)


@pytest.mark.parametrize("name", LOSSES)
def test_no_more_launches_on_more_ranks(name: str, launches: Any) -> None:
    for ranks in (1, 3, 8):
        assert 0 < most(name, launches, ranks) <= MOST, ranks


def test_launches_for_each_rank_would_be_counted(launches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_rank(self: GatherExchange, prepare: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        return (([block], prepare(x)) for block, x in zip(self.blocks, self, strict=True))

    monkeypatch.setattr(GatherExchange, "windows", by_rank)
    assert most("CLIP", launches, 8) > 5 * MOST
