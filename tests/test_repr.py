"""What print() shows of a loss: whatever a user has chosen."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import contrastive_zoo as cz


def indices(embeddings, labels): ...


def pairs(embeddings, labels, indices_tuple=None): ...


class Miner(nn.Module):
    def forward(self, embeddings, labels): ...


def scaled(log_scale: float) -> cz.LearnableTemperature:
    temperature = cz.LearnableTemperature(0.07)
    temperature.log_scale.data.fill_(log_scale)
    return temperature


def without_value() -> cz.LearnableTemperature:
    with torch.device("meta"):
        return cz.LearnableTemperature(0.07)


WHOLE = {
    "defaults": (
        lambda: cz.DistributedLoss(cz.NTXent()),
        "DistributedLoss(\n  (loss): NTXent(temperature=0.1, normalize=True, reduction='mean')\n)",
    ),
    "functions": (lambda: cz.DistributedLoss(pairs, miner=indices), "DistributedLoss(loss=pairs, miner=indices)"),
    "learnable": (lambda: cz.LearnableTemperature(0.07), "LearnableTemperature(0.07)"),
    "learnt": (lambda: scaled(-math.log(0.125)), "LearnableTemperature(0.125)"),
    "the value that the next call uses": (lambda: scaled(100.0), "LearnableTemperature(0.01)"),
    "bound": (lambda: cz.LearnableTemperature(0.1, max_scale=math.inf), "LearnableTemperature(0.1, max_scale=inf)"),
    "no value": (without_value, "LearnableTemperature()"),
}
PARTS = {
    "(miner): Miner()": lambda: cz.DistributedLoss(pairs, miner=Miner()),
    "(temperature): LearnableTemperature(0.07)": lambda: cz.NTXent(temperature=cz.LearnableTemperature(0.07)),
    "NTXent(temperature=0.1, normalize=True, reduction='mean', check_finite=False)": lambda: cz.NTXent(
        check_finite=False
    ),
    "reduction='mean', check_finite=False)": lambda: cz.Triplet(mining="hard", check_finite=False),
    "check_finite=False": lambda: cz.ArcFace(2, 2, check_finite=False),
}
OPTIONS = {"grad_reduction": "sum", "prefer_native": True, "check_finite": False, "check_equal": False,
           "check_distinct": False, "ring": True}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_a_loss_is_shown(name: str) -> None:
    make, text = WHOLE[name]
    assert repr(make()) == text


def test_what_is_not_the_default_is_shown() -> None:
    for text, make in PARTS.items():
        assert text in repr(make())
    for name, value in OPTIONS.items():
        assert repr(cz.DistributedLoss(cz.NTXent(), **{name: value})).splitlines()[1] == f"  {name}={value!r}"
    for loss in (cz.NTXent(), cz.Triplet(), cz.ArcFace(2, 2)):
        assert "check_finite" not in repr(loss)


def group_shown() -> str:
    return repr(cz.DistributedLoss(cz.NTXent(), process_group=dist.group.WORLD)).splitlines()[1]


def test_a_process_group_is_shown_by_its_ranks(worlds) -> None:
    assert worlds.run(2, group_shown) == ["  process_group=<ranks [0, 1]>"] * 2
