"""Twenty steps of real training on W processes end where one process ends, whoever reduces the gradients."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import contrastive_zoo as cz
from contrastive_zoo.testing.batch import FEATURES, GlobalBatch
from contrastive_zoo.testing.measurement import Call
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import close, distance, drawn

STEPS, SAMPLES, D = 20, 8, 4
SPLITS = {  # one after the other, step by step; an empty shard among them
    1: [(8,)],
    2: [(5, 3), (1, 7), (8, 0), (4, 4)],
    3: [(3, 2, 3), (0, 5, 3), (1, 1, 6), (8, 0, 0)],
}


@dataclass(frozen=True)
class Recipe:
    """A loss as its author would train it on one process."""

    name: str
    make: Callable[[], nn.Module]
    call: Call = "labels"
    miner: Callable[[], Any] | None = None
    learnt: bool = False

    def __str__(self) -> str:
        return self.name


def pml(name: str, *, miner: str = "", learnt: bool = False, **settings: Any) -> Recipe:
    """One of pytorch-metric-learning's, with a miner if named, with weights of its own if ``learnt``."""

    def make() -> nn.Module:
        from pytorch_metric_learning import losses

        weights = {"num_classes": 4, "embedding_size": D} if learnt else {}
        return getattr(losses, name)(**weights, **settings)

    def make_miner() -> Any:
        from pytorch_metric_learning import miners

        return getattr(miners, miner)(**({"type_of_triplets": "semihard"} if "Triplet" in miner else {}))

    return Recipe(f"{name}{' + ' * bool(miner)}{miner}", make, "labels", make_miner if miner else None, learnt)


def info_nce() -> nn.Module:
    return cz.InfoNCE(temperature=cz.LearnableTemperature(0.5), symmetric=True)


RECIPES = [
    Recipe("NTXent", lambda: cz.NTXent(temperature=0.5), "views"),
    Recipe("InfoNCE", info_nce, "views", learnt=True),
    Recipe("SupCon", lambda: cz.SupCon(temperature=0.3)),
    pml("TripletMarginLoss", miner="TripletMarginMiner", margin=0.2),
    pml("ProxyAnchorLoss", learnt=True, alpha=8),
    pml("ArcFaceLoss", learnt=True, scale=8),
]
BY_NAME = {recipe.name: recipe for recipe in RECIPES}
SOME = [BY_NAME[name] for name in ("InfoNCE", "SupCon", "ProxyAnchorLoss", "TripletMarginLoss + TripletMarginMiner")]


# ------------------------------------------------------------------------------------------------------------ trainers


class Trainer(NamedTuple):
    """How encoder and loss are wrapped, and what is done to gradients after the backward pass.

    Args:
        wrap: ``wrap(module)``, for the encoder and, if it has parameters, for the global loss.
        reduce: ``reduce(modules)``.
        grad_reduction: what DistributedLoss is told.
    """

    wrap: Callable[[nn.Module], nn.Module] = lambda module: module
    reduce: Callable[[list[nn.Module]], None] = lambda modules: None
    grad_reduction: str = "mean"


def ddp_that_sums(module: nn.Module) -> nn.Module:
    def hook(_, bucket):  # torch wants its own class in the annotation, or none
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda x: x.value()[0])

    wrapped = DistributedDataParallel(module)
    wrapped.register_comm_hook(None, hook)
    return wrapped


def average(modules: list[nn.Module]) -> None:
    for module in modules:
        cz.average_gradients(module)


def add_up(modules: list[nn.Module]) -> None:
    for module in modules:
        for parameter in module.parameters():
            dist.all_reduce(parameter.grad)


TRAINERS = {
    "DDP": Trainer(DistributedDataParallel),
    "DDP with a hook that sums": Trainer(ddp_that_sums, grad_reduction="sum"),
    "average_gradients": Trainer(reduce=average),
    "a sum by hand": Trainer(reduce=add_up, grad_reduction="sum"),
}


@dataclass(frozen=True)
class Plan:
    """How a recipe is trained on W processes.

    Args:
        trainer: who reduces gradients.
        loss_in: where the loss's own parameters are: ``"nothing"`` but their optimiser, the ``"trainer"`` around
            DistributedLoss, or ``"DDP inside"`` it.
        micro: batches that are accumulated before a step.
    """

    trainer: str = "DDP"
    loss_in: str = "nothing"
    micro: int = 1
    told: str | None = None
    """Another grad_reduction than the trainer's: a mistake."""


class Trained(NamedTuple):
    """What 20 steps left behind."""

    values: Tensor
    encoder: list[Tensor]
    loss: list[Tensor]


# ------------------------------------------------------------------------------------------------------- one training


def train(recipe: Recipe, plan: Plan, *, alone: bool = False) -> Trained:
    """On every rank; alone, plain training by the loss without a wrapper."""
    trainer = TRAINERS[plan.trainer]
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, D)).double()
    loss, miner = recipe.make().double(), recipe.miner() if recipe.miner else None
    bare = [encoder, loss]
    weights = [list(module.parameters()) for module in bare]
    optimizer = torch.optim.SGD([x for xs in weights for x in xs], lr=0.02, momentum=0.9)
    if not alone:
        encoder = trainer.wrap(encoder)
        inner = DistributedDataParallel(loss) if plan.loss_in == "DDP inside" else loss
        told = plan.told or trainer.grad_reduction
        loss = cz.DistributedLoss(inner, miner=miner, grad_reduction=told)
        if plan.loss_in == "trainer":
            loss = trainer.wrap(loss)
    values = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(plan.micro):
            with _synchronised([encoder, loss], last=micro == plan.micro - 1):
                x, *y = my_rows(recipe.call, step, micro)
                z = encoder(x)
                rows = [z, *y] if y else list(z.split(len(z) // 2 or 1, 0) if len(z) else (z, z))
                if alone and miner is not None:
                    rows.append(miner(*rows))
                value = loss(*rows)
                (value / plan.micro).backward()
            values.append(value.detach())
        # a parameter outside the trainer must come out complete by itself; a sum has to reach all of them
        trainer.reduce(bare if trainer.grad_reduction == "sum" else bare[:1])
        optimizer.step()
    return Trained(torch.stack(values), *([x.detach() for x in xs] for xs in weights))


@contextlib.contextmanager
def _synchronised(modules: list[nn.Module], *, last: bool) -> Iterator[None]:
    """Only the last micro-batch's gradients are sent."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            if not last and isinstance(module, DistributedDataParallel):
                stack.enter_context(module.no_sync())
        yield


def my_rows(call: Call, step: int, micro: int) -> list[Tensor]:
    """Features of this rank's samples, view after view, and their labels if the loss takes labels."""
    rank, splits = dist.get_rank(), SPLITS[dist.get_world_size()]
    shards = splits[(step + micro) % len(splits)]
    batch = GlobalBatch(shards, seed=10 * step + micro)
    mine = slice(sum(shards[:rank]), sum(shards[: rank + 1]))
    if call == "views":
        return [torch.cat([x[mine] for x in batch.samples(2)])]
    classes = torch.randint(4, (SAMPLES,), generator=torch.Generator().manual_seed(batch.seed))
    return [batch.samples()[0][mine], classes[mine]]


_alone: dict[tuple[str, int], Trained] = {}


def alone(worlds: Worlds, recipe: Recipe, micro: int = 1) -> Trained:
    """What one process computes, without this library's DistributedLoss, DDP or groups; computed once."""
    key = recipe.name, micro
    if key not in _alone:
        _alone[key] = worlds.run(1, train, recipe, Plan(micro=micro), alone=True)[0]
    return _alone[key]


def assert_same(found: list[Trained], expected: Trained) -> None:
    for by_rank in found:
        close(by_rank.values, expected.values)
        for x, y in zip(by_rank.encoder + by_rank.loss, expected.encoder + expected.loss, strict=True):
            close(x, y)


# --------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize(("recipe", "world_size"), drawn(RECIPES, [2, 3], one_in=2), ids=str)
def test_ddp_trains_what_one_process_trains(recipe: Recipe, world_size: int, worlds: Worlds) -> None:
    assert_same(worlds.run(world_size, train, recipe, Plan()), alone(worlds, recipe))


@pytest.mark.parametrize(
    ("recipe", "loss_in"), drawn([x for x in RECIPES if x.learnt], ["trainer", "DDP inside"], one_in=2), ids=str
)
def test_ddp_may_hold_the_loss_too(recipe: Recipe, loss_in: str, worlds: Worlds) -> None:
    assert_same(worlds.run(2, train, recipe, Plan(loss_in=loss_in)), alone(worlds, recipe))


@pytest.mark.parametrize(
    ("recipe", "trainer"), drawn(SOME, [name for name in TRAINERS if name != "DDP"], one_in=2), ids=str
)
def test_other_trainers_train_what_one_process_trains(recipe: Recipe, trainer: str, worlds: Worlds) -> None:
    # a hook that sums must see the loss's parameters as well, and so the loss goes into the trainer
    loss_in = "trainer" if recipe.learnt and "hook" in trainer else "nothing"
    assert_same(worlds.run(3, train, recipe, Plan(trainer, loss_in)), alone(worlds, recipe))


@pytest.mark.parametrize(
    ("recipe", "trainer"), drawn(SOME, ["DDP", "DDP with a hook that sums", "average_gradients"], one_in=2), ids=str
)
def test_gradients_accumulate_over_uneven_micro_batches(recipe: Recipe, trainer: str, worlds: Worlds) -> None:
    plan = Plan(trainer, "trainer" if recipe.learnt and trainer != "average_gradients" else "nothing", micro=3)
    assert_same(worlds.run(2, train, recipe, plan), alone(worlds, recipe, micro=3))


@pytest.mark.parametrize(("trainer", "told"), [("DDP", "sum"), ("a sum by hand", "mean")])
def test_a_wrong_grad_reduction_trains_something_else(trainer: str, told: str, worlds: Worlds) -> None:
    recipe = BY_NAME["SupCon"]
    found = worlds.run(2, train, recipe, replace(Plan(trainer), told=told))
    assert distance(found[0].encoder[0], alone(worlds, recipe).encoder[0]) > 1e-3
