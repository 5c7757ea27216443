"""What print() shows of a loss: whatever a user has chosen."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import contrastive_zoo as cz


def indices(embeddings, labels): ...


def pairs(embeddings, labels, indices_tuple=None): ...


def test_defaults_are_not_shown() -> None:
    shown = "DistributedLoss(\n  (loss): NTXent(temperature=0.1, normalize=True, reduction='mean')\n)"
    assert repr(cz.DistributedLoss(cz.NTXent())) == shown


@pytest.mark.parametrize(
    "option",
    [
        {"grad_reduction": "sum"},
        {"mode": "sharded"},
        {"prefer_native": True},
        {"check_finite": False},
        {"check_equal": False},
        {"check_distinct": False},
        {"broadcast_parameters": True},
        {"static_shapes": True},
        {"ring": True},
    ],
    ids=str,
)
def test_an_option_that_is_not_the_default_is_shown(option: dict[str, object]) -> None:
    ((name, value),) = option.items()
    assert repr(cz.DistributedLoss(cz.NTXent(), **option)).splitlines()[1] == f"  {name}={value!r}"


def test_functions_are_shown_by_their_names() -> None:
    assert repr(cz.DistributedLoss(pairs, miner=indices)) == "DistributedLoss(loss=pairs, miner=indices)"


def test_a_miner_that_is_a_module_stands_below() -> None:
    class Miner(nn.Module):
        def forward(self, embeddings, labels): ...

    assert "(miner): Miner()" in repr(cz.DistributedLoss(pairs, miner=Miner()))


def group_shown() -> str:
    return repr(cz.DistributedLoss(cz.NTXent(), process_group=dist.group.WORLD)).splitlines()[1]


def test_a_process_group_is_shown_by_its_ranks(worlds) -> None:
    assert worlds.run(2, group_shown) == ["  process_group=<ranks [0, 1]>"] * 2


def test_a_learnable_temperature_shows_its_value() -> None:
    t = cz.LearnableTemperature(0.07)
    assert repr(t) == "LearnableTemperature(0.07)"
    assert "(temperature): LearnableTemperature(0.07)" in repr(cz.NTXent(temperature=t))
    t.log_scale.data.fill_(-math.log(0.125))
    assert repr(t) == "LearnableTemperature(0.125)"
    t.log_scale.data.fill_(100.0)
    assert repr(t) == "LearnableTemperature(0.01)", "the value that the next call uses"
    assert repr(cz.LearnableTemperature(0.1, max_scale=math.inf)) == "LearnableTemperature(0.1, max_scale=inf)"


def test_a_learnable_temperature_without_a_value_can_be_printed() -> None:
    with torch.device("meta"):
        assert repr(cz.LearnableTemperature(0.07)) == "LearnableTemperature()"


@pytest.mark.parametrize(
    "loss", [cz.NTXent, cz.Triplet, lambda **x: cz.ArcFace(2, 2, **x)], ids=["own", "rows", "classes"]
)
def test_finite_rows_that_are_not_checked_are_shown(loss) -> None:
    assert "check_finite" not in repr(loss())
    assert "check_finite=False" in repr(loss(check_finite=False))
