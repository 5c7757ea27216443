"""What has a state is read with weights_only=True; copies share the process group; a queue that differs is noticed."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning.miners import BatchHardMiner
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import assert_says, error_message, numbers
from tests.own_losses import OF_CATALOGUE


def test_weights_only_reads_every_state() -> None:
    """Also the position of a sampler, which is plain numbers."""
    sampler, others = cz.data.GlobalBatchSampler(8, batch_size=2), [cz.MomentumEncoder(nn.BatchNorm1d(3))]
    modules = [*(of.make() for of in OF_CATALOGUE.values()), cz.CrossBatchMemory(cz.SupCon(), 6, 3), *others]
    for x, state in [*((x, x.state_dict()) for x in modules), (sampler, sampler.state_dict(step=1))]:
        x.load_state_dict(saved_and_loaded(state, weights_only=True))


def rows(seed: int = 1) -> Tensor:
    return numbers(4, 3, seed=seed).float()


def queue_that_differs_on_one_rank() -> str | None:
    queue = cz.MemoryQueue(4, 3)
    queue.enqueue(rows(dist.get_rank())[: 2 - dist.get_rank()])
    if dist.get_rank() == 1:
        queue.embeddings[1, 2] += 1e-3
    # the ring is full after the fourth row, and begins again
    return error_message(lambda: [queue.enqueue(rows()[: 1 - dist.get_rank()]) for _ in range(3)])


def test_a_queue_whose_content_differs_is_noticed(worlds: Worlds) -> None:
    first, second = worlds.run(2, queue_that_differs_on_one_rank)
    assert first == second
    assert first is not None
    assert "its content" in first


def local_rows() -> Tensor:
    return numbers(2, 3, seed=dist.get_rank())


Function = Callable[[Any], Any]
HOLDERS: dict[str, tuple[Function, Function, Function]] = {
    "DistributedLoss": (
        lambda group: cz.DistributedLoss(cz.NTXent(), process_group=group),
        lambda x: x(local_rows(), local_rows().flip(0)),
        lambda x: x,
    ),
    "Monitor": (
        lambda group: cz.Monitor(cz.DistributedLoss(cz.NTXent(), process_group=group)),
        lambda x: x._loss_fn(local_rows(), local_rows().flip(0)),
        lambda x: x._loss_fn,
    ),
    "DistributedMiner": (
        lambda group: cz.data.DistributedMiner(BatchHardMiner(), process_group=group),
        lambda x: x(local_rows(), torch.arange(2)),
        lambda x: x,
    ),
    "GradCache": (
        lambda group: cz.GradCache(nn.Linear(3, 1).double(), 1, process_group=group),
        lambda x: x(local_rows()).shape,
        lambda x: x,
    ),
    "MomentumEncoder": (
        lambda group: cz.MomentumEncoder(cz.GradCache(nn.Linear(3, 1).double(), 1, process_group=group)),
        lambda x: x.encoder(local_rows()).shape,
        lambda x: x.encoder,
    ),
    "GlobalBatchSampler": (
        lambda group: cz.data.GlobalBatchSampler(6, batch_size=4, shuffle=False, process_group=group),
        list,
        lambda x: x,
    ),
    "RetrievalMetrics": (
        lambda group: cz.metrics.RetrievalMetrics("recall@1", process_group=group),
        lambda x: (x.reset(), x.update(local_rows(), torch.arange(2)), x.compute())[2],
        lambda x: x,
    ),
}
"""How an object with a process group is made, what it computes, and where in it the group is."""


def saved_and_loaded(value: Any, *, weights_only: bool = False) -> Any:
    torch.save(value, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def copies(name: str, as_world: bool) -> tuple[str | None, str]:
    make, use, holder = HOLDERS[name]
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


@pytest.mark.parametrize("name", HOLDERS)
def test_a_copy_shares_the_group_and_a_file_says_that_it_has_none(name: str, worlds: Worlds) -> None:
    for as_world in (False, True):
        (message, _), _ = worlds.run(2, copies, name, as_world)
        assert_says(message, "process_group: … got str 'left out of the file, … set .process_group of what was loaded'")
