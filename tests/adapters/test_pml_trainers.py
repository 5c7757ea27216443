"""pytorch-metric-learning's trainers are the same on two processes as on one; its record keeper reads a wrapped miner."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses, miners, trainers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import contrastive_zoo as cz
from contrastive_zoo.data.miner import DistributedMiner
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import close, distance, numbers

# how the library calls NumPy
pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

STEPS, BATCH, D, CLASSES = 4, 8, 4, 3
SHARES = {1: (8,), 2: (3, 5)}


def my_samples() -> list[int]:
    of_step = torch.arange(STEPS * BATCH).view(STEPS, BATCH).split(SHARES[dist.get_world_size()], 1)
    return of_step[dist.get_rank()].flatten().tolist()


def train(*, distributed: bool) -> list[Tensor]:
    """Train with a classifier, proxies and a miner; return all parameters."""
    torch.manual_seed(0)
    models: dict[str, nn.Module] = {"trunk": nn.Linear(3, D).double(), "classifier": nn.Linear(D, CLASSES).double()}
    functions: dict[str, Any] = {
        "metric_loss": losses.ProxyAnchorLoss(CLASSES, D, alpha=4).double(),
        "classifier_loss": nn.CrossEntropyLoss(),
    }
    mining: dict[str, Any] = {"tuple_miner": miners.MultiSimilarityMiner()}
    weights = [parameter for module in (*models.values(), *functions.values()) for parameter in module.parameters()]
    if distributed:
        models = {name: DistributedDataParallel(x) for name, x in models.items()}
        functions = {name: cz.DistributedLoss(x) for name, x in functions.items()}
        mining = {name: DistributedMiner(x) for name, x in mining.items()}
    trained = {name: x for name, x in {**models, **functions}.items() if [*x.parameters()]}
    trainers.TrainWithClassifier(
        models=models,
        optimizers={f"{name}_optimizer": torch.optim.SGD(x.parameters(), lr=0.1) for name, x in trained.items()},
        batch_size=SHARES[dist.get_world_size()][dist.get_rank()],
        loss_funcs=functions,
        mining_funcs=mining,
        dataset=TensorDataset(numbers(STEPS * BATCH, 3, seed=0), torch.arange(STEPS * BATCH) % CLASSES),
        sampler=my_samples(),
        data_device=torch.device("cpu"),
        dataloader_num_workers=0,
    ).train()
    return [x.detach() for x in weights]


def test_a_trainer_computes_the_weights_of_one_process(worlds: Worlds) -> None:
    (expected,) = worlds.run(1, train, distributed=False)
    for by_rank in worlds.run(2, train, distributed=True):
        for found, wanted in zip(by_rank, expected, strict=True):
            close(found, wanted)
    by_itself = worlds.run(2, train, distributed=False)
    assert distance(by_itself[0][0], expected[0]) > 1e-3


def test_record_keeper_finds_what_a_wrapped_miner_records() -> None:
    """The record keeper reads two attributes, and names the table after the class."""
    miner = miners.TripletMarginMiner(margin=0.5, collect_stats=True)
    wrapped = DistributedMiner(miner)
    wrapped(numbers(BATCH, D, seed=1), torch.arange(BATCH) % CLASSES)
    for kept in ("_record_these", "_record_these_stats"):
        names = getattr(wrapped, kept)
        assert names == getattr(miner, kept) != []
        assert [getattr(wrapped, name) for name in names] == [getattr(miner, name) for name in names]
    assert not hasattr(wrapped, "_private")
    wrapped.margin = 0.25
    assert miner.margin == 0.25
