"""A copy of what holds a process group shares it; what was saved says what it lacks."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning.miners import BatchHardMiner
from torch import nn
from torch.optim.swa_utils import AveragedModel

import contrastive_zoo as cz
from contrastive_zoo.data.batch_sampler import GlobalBatchSampler
from contrastive_zoo.data.miner import DistributedMiner
from contrastive_zoo.metrics.retrieval import RetrievalMetrics
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import assert_says, error_message, numbers


def rows() -> torch.Tensor:
    return numbers(2, 3, seed=dist.get_rank())


Case = tuple[Callable[[Any], Any], Callable[[Any], Any], Callable[[Any], Any]]

CASES: dict[str, Case] = {
    "DistributedLoss": (
        lambda group: cz.DistributedLoss(cz.NTXent(), process_group=group),
        lambda x: x(rows(), rows().flip(0)),
        lambda x: x,
    ),
    "Monitor": (
        lambda group: cz.Monitor(cz.DistributedLoss(cz.NTXent(), process_group=group)),
        lambda x: x._loss_fn(rows(), rows().flip(0)),
        lambda x: x._loss_fn,
    ),
    "DistributedMiner": (
        lambda group: DistributedMiner(BatchHardMiner(), process_group=group),
        lambda x: x(rows(), torch.arange(2)),
        lambda x: x,
    ),
    "GradCache": (
        lambda group: cz.GradCache(nn.Linear(3, 1).double(), 1, process_group=group),
        lambda x: x(rows()).shape,
        lambda x: x,
    ),
    "MomentumEncoder": (
        lambda group: cz.MomentumEncoder(cz.GradCache(nn.Linear(3, 1).double(), 1, process_group=group)),
        lambda x: x.encoder(rows()).shape,
        lambda x: x.encoder,
    ),
    "GlobalBatchSampler": (
        lambda group: GlobalBatchSampler(6, batch_size=4, shuffle=False, process_group=group),
        list,
        lambda x: x,
    ),
    "RetrievalMetrics": (
        lambda group: RetrievalMetrics("recall@1", process_group=group),
        lambda x: (x.reset(), x.update(rows(), torch.arange(2)), x.compute())[2],
        lambda x: x,
    ),
}
"""How an object with a process group is made, what it computes, and where in it the group is."""


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def copies(name: str, as_world: bool) -> tuple[str | None, str]:
    make, use, holder = CASES[name]
    group = dist.new_group()
    first = make(cz.World.of(group) if as_world else group)
    expected = str(use(copy.deepcopy(first)))
    others = [first, copy.copy(first), copy.deepcopy(copy.deepcopy(first))]
    if isinstance(first, nn.Module):
        others.append(AveragedModel(first).module)
    for other in others:
        assert cz.World.of(holder(other).process_group).process_group is group
        assert str(use(copy.deepcopy(other))) == expected
    loaded = saved_and_loaded(first)
    message = error_message(lambda: use(loaded))
    holder(loaded).process_group = group
    assert str(use(loaded)) == expected
    without = saved_and_loaded(make(None))
    assert holder(without).process_group is None
    assert str(use(without)) == expected
    return message, expected


@pytest.mark.parametrize("name", CASES)
def test_a_copy_shares_the_group_and_a_file_says_that_it_has_none(name: str, worlds: Worlds) -> None:
    for as_world in (False, True):
        (message, _), _ = worlds.run(2, copies, name, as_world)
        assert_says(message, "process_group: … got str 'left out of the file, … set .process_group of what was loaded'")
