"""A loss or miner that gathers is refused, outermost and inside of another one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses, miners
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper, DistributedMinerWrapper
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.invariants import CONTRACT
from contrastive_zoo.testing.measurement import Case, Trial
from contrastive_zoo.testing.worlds import Worlds

wrap, mining = cz.DistributedLoss, cz.data.DistributedMiner
LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])


def triplets() -> Any:
    return losses.TripletMarginLoss(0.5)


# it moved
OF_VERSION_3 = type("DistributedLossWrapper", (nn.Module,), {"__module__": "pytorch_metric_learning.distributed"})


def distributed() -> Any:
    return wrap(losses.ContrastiveLoss())


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "ours in MultipleLosses": (
        lambda: wrap(losses.MultipleLosses([triplets(), distributed()])),
        r"loss\.losses\.1 is a DistributedLoss",
    ),
    "theirs in MultipleLosses": (
        lambda: wrap(losses.MultipleLosses({"a": DistributedLossWrapper(triplets())})),
        r"loss\.losses\.a is a DistributedLossWrapper",
    ),
    "a miner in MultipleLosses": (
        lambda: wrap(losses.MultipleLosses([triplets()], [mining(miners.BatchHardMiner())])),
        r"loss\.miners\.0 is a DistributedMiner.*the bare miner",
    ),
    "ours in a queue": (lambda: wrap(_queue(distributed())), r"loss\.loss is a DistributedLoss"),
    "theirs": (lambda: wrap(DistributedLossWrapper(triplets())), "loss is a DistributedLossWrapper"),
    "theirs, of version 3": (lambda: wrap(OF_VERSION_3()), "loss is a DistributedLossWrapper"),
    "their miner": (
        lambda: wrap(triplets(), miner=DistributedMinerWrapper(miners.BatchHardMiner())),
        "miner is a DistributedMinerWrapper.*the bare miner",
    ),
    "our miner": (lambda: wrap(triplets(), miner=mining(miners.BatchHardMiner())), "miner is a DistributedMiner"),
    "a class as miner": (
        lambda: wrap(triplets(), miner=miners.BatchHardMiner),
        r"a miner is an instance, got the class BatchHardMiner",
    ),
}


def _queue(inner: Any) -> Any:
    queue = losses.CrossBatchMemory(losses.ContrastiveLoss(), 4)
    queue.loss = inner
    return queue


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrapper_is_refused_with_its_place(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("make", [distributed, lambda: DistributedLossWrapper(losses.ContrastiveLoss())])
def test_a_wrapper_that_torch_does_not_know_as_a_part_sees_one_process(make: Callable[[], Any], worlds: Worlds) -> None:
    def inside() -> Any:
        if dist.get_world_size() == 1:
            return wrap(losses.ContrastiveLoss(), miner=miners.BatchHardMiner())
        inner, miner = make(), DistributedMinerWrapper(miners.BatchHardMiner())
        return wrap(lambda z, labels, indices_tuple: inner(z, labels, indices_tuple), miner=lambda *rows: miner(*rows))

    trial = Trial(Case(inside), GlobalBatch((3, 5), d=4, seed=0), worlds)
    for invariant in CONTRACT:
        invariant(trial)


def test_a_bound_method_of_a_trainer_is_no_inner_wrapper() -> None:
    class Trainer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = wrap(triplets())
            self.second = wrap(self.of_rows)
            self.third = wrap(lambda z, labels: self.of_rows(z, labels))

        def of_rows(self, z: Tensor, labels: Tensor) -> Tensor:
            return z.square().sum()

    assert Trainer().third(torch.eye(2), torch.arange(2)) == 2
