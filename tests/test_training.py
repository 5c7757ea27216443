"""Twenty steps of real training on W processes end where one process ends, whoever reduces the gradients."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses, miners
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import contrastive_zoo as cz
from contrastive_zoo.ranks.random_keys import random_keys
from contrastive_zoo.testing.batch import FEATURES, GlobalBatch
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EXACT, close, distance, drawn, numbers

pytestmark = pytest.mark.trainers

STEPS, SAMPLES, D = 20, 8, 3
SPLITS = {  # one after the other, step by step; an empty shard among them
    1: [(8,)],
    2: [(5, 3), (1, 7), (8, 0), (4, 4)],
    3: [(3, 2, 3), (0, 5, 3), (1, 1, 6), (8, 0, 0)],
}
WEIGHTS = {"num_classes": 4, "embedding_size": D}

RECIPES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "NTXent": (lambda: cz.NTXent(temperature=0.5), lambda: None),
    "InfoNCE, learnt": (lambda: cz.InfoNCE(temperature=cz.LearnableTemperature(0.5), symmetric=True), lambda: None),
    "SupCon": (lambda: cz.SupCon(temperature=0.3), lambda: None),
    "TripletMarginLoss": (
        lambda: losses.TripletMarginLoss(margin=0.2),
        lambda: miners.TripletMarginMiner(type_of_triplets="semihard"),
    ),
    "ProxyAnchorLoss, learnt": (lambda: losses.ProxyAnchorLoss(**WEIGHTS, alpha=8), lambda: None),
    "ArcFaceLoss, learnt": (lambda: losses.ArcFaceLoss(**WEIGHTS, scale=8), lambda: None),
    "memory of InfoNCE": (lambda: cz.CrossBatchMemory(cz.InfoNCE(), 13, D, dtype=torch.float64), lambda: None),
    "memory of SupCon": (lambda: cz.CrossBatchMemory(cz.SupCon(), 9, D, dtype=torch.bfloat16), lambda: None),
}
OF_VIEWS = "NTXent", "InfoNCE, learnt", "memory of InfoNCE"

SOME = ("InfoNCE, learnt", "SupCon", "ProxyAnchorLoss, learnt", "TripletMarginLoss")


class Trainer(NamedTuple):
    wrap: Callable[[nn.Module], nn.Module] = lambda module: module
    reduce: Callable[[list[nn.Module]], None] = lambda modules: None
    grad_reduction: Any = "mean"


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


class Plan(NamedTuple):
    recipe: str
    trainer: str = "DDP"
    loss_in: str = "nothing"  # its parameters: their optimiser, the "trainer" around DistributedLoss, or "DDP inside"
    micro: int = 1  # batches that are accumulated before a step
    told: Any = None  # another grad_reduction than the trainer's: a mistake


class Trained(NamedTuple):
    values: Tensor
    parameters: list[Tensor]
    state: list[Tensor]


def train(plan: Plan, *, alone: bool = False) -> Trained:
    trainer = TRAINERS[plan.trainer]
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, D)).double()
    make, make_miner = RECIPES[plan.recipe]
    loss, miner = make(), make_miner()
    for x in loss.parameters():
        x.data = x.data.double()  # and a memory keeps its dtype
    bare = [encoder, loss]
    weights = [x for module in bare for x in module.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.02, momentum=0.9)
    if not alone:
        encoder = trainer.wrap(encoder)
        inner = DistributedDataParallel(loss) if plan.loss_in == "DDP inside" else loss
        loss = cz.DistributedLoss(inner, miner=miner, grad_reduction=plan.told or trainer.grad_reduction)
        if plan.loss_in == "trainer" and any(True for _ in loss.parameters()):
            loss = trainer.wrap(loss)  # which copies rank 0's memory to all
    values = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(plan.micro):
            with _synchronised([encoder, loss], last=micro == plan.micro - 1):
                x, *labels = local_rows(plan.recipe in OF_VIEWS, step, micro)
                z = encoder(x)
                rows = [z, *labels] if labels else list(z.split(len(z) // 2 or 1, 0) if len(z) else (z, z))
                if plan.recipe.startswith("memory"):
                    rows[1] = rows[1].detach()
                if alone and miner is not None:
                    rows.append(miner(*rows))
                value = loss(*rows)
                (value / plan.micro).backward()
            values.append(value.detach())
        # a parameter outside the trainer must come out complete by itself; a sum has to reach all of them
        trainer.reduce(bare if trainer.grad_reduction == "sum" else bare[:1])
        optimizer.step()
    return Trained(torch.stack(values), [x.detach() for x in weights], [*bare[1].buffers()])


@contextlib.contextmanager
def _synchronised(modules: list[nn.Module], *, last: bool) -> Iterator[None]:
    """Only the last micro-batch's gradients are sent."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            if not last and isinstance(module, DistributedDataParallel):
                stack.enter_context(module.no_sync())
        yield


def local_rows(of_views: bool, step: int, micro: int) -> list[Tensor]:
    """Features of this rank's samples, view after view, and their labels if the loss takes labels."""
    rank, splits = dist.get_rank(), SPLITS[dist.get_world_size()]
    shards = splits[(step + micro) % len(splits)]
    batch, local = GlobalBatch(shards, seed=10 * step + micro), slice(sum(shards[:rank]), sum(shards[: rank + 1]))
    if of_views:
        return [torch.cat([x[local] for x in batch.samples(2)])]
    classes = torch.randint(4, (SAMPLES,), generator=torch.Generator().manual_seed(batch.seed))
    return [batch.samples()[0][local], classes[local]]


@functools.cache
def on_one_process(worlds: Worlds, recipe: str, micro: int) -> Trained:
    return worlds.run(1, train, Plan(recipe, micro=micro), alone=True)[0]


def loss_in(recipe: str, trainer: str) -> str:
    """A hook that sums must see the loss's parameters as well."""
    return "trainer" if recipe in LEARNT and "DDP" in trainer else "nothing"


LEARNT = [name for name in RECIPES if "learnt" in name]
WITHOUT_DDP = [name for name in TRAINERS if name != "DDP"]
OF_MEMORIES = [name for name in RECIPES if name.startswith("memory")]
ROUNDS = [(2, "average_gradients", "nothing"), (2, "DDP", "trainer"), (3, "a sum by hand", "nothing")]
TRAININGS: list[tuple[int, Plan]] = [
    *((world_size, Plan(recipe)) for recipe, world_size in drawn(RECIPES, [2, 3], one_in=2)),
    *((2, Plan(x, "DDP", of)) for x, of in drawn(LEARNT, ["trainer", "DDP inside"], one_in=2)),
    *((3, Plan(x, trainer, loss_in(x, trainer))) for x, trainer in drawn(SOME, WITHOUT_DDP, one_in=2)),
    *((2, Plan(x, trainer, loss_in(x, trainer), 3)) for x, trainer in drawn(SOME, [*TRAINERS][:3], one_in=2)),
    *((world_size, Plan(x, trainer, of)) for x, (world_size, trainer, of) in drawn(OF_MEMORIES, ROUNDS, one_in=2)),
]


@pytest.mark.parametrize(("world_size", "plan"), TRAININGS, ids=str)
def test_a_training_ends_as_on_one_process(world_size: int, plan: Plan, worlds: Worlds) -> None:
    expected = on_one_process(worlds, plan.recipe, plan.micro)
    for found in worlds.run(world_size, train, plan):
        close(found.values, expected.values)
        for x, y in zip(found.parameters, expected.parameters, strict=True):
            close(x, y)
        for x, y in zip(found.state, expected.state, strict=True):
            close(x, y, 0.01 if y.dtype == torch.bfloat16 else EXACT)


@pytest.mark.parametrize(("trainer", "told"), [("DDP", "sum"), ("a sum by hand", "mean")])
def test_a_wrong_grad_reduction_trains_something_else(trainer: str, told: str, worlds: Worlds) -> None:
    found = worlds.run(2, train, Plan("SupCon", trainer, told=told))
    assert distance(found[0].parameters[0], on_one_process(worlds, "SupCon", 1).parameters[0]) > 1e-3


ITEMS, BATCH, ALL_STEPS, SAVED = 50, 12, 12, 7
"""Two epochs of batches of 12, 12, 12, 12 and 2, and two steps of a third; the checkpoint is in the middle of the second."""

BOUNDS = {1: (0, 1), 2: (0, 2 / 3, 1), 4: (0, 1 / 2, 2 / 3, 2 / 3, 1)}
"""Where the ranks' parts of a batch begin and end: uneven, and one of four has nothing."""


class UnevenParts(cz.data.GlobalBatchSampler):
    def bounds(self, batch: Any, world_size: int) -> list[int]:
        return [round(len(batch) * x) for x in BOUNDS[world_size]]


class Training:
    """An encoder, a loss with a memory and a learnt temperature, one with random numbers, AdamW, and a sampler."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.images, self.labels = numbers(ITEMS, 6, seed=1), torch.arange(ITEMS) % 7
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        memory = cz.CrossBatchMemory(cz.SupCon(temperature=cz.LearnableTemperature(0.5)), 20, 4, dtype=torch.float64)
        self.loss_fn, self.random_loss = cz.DistributedLoss(memory.double()), cz.DistributedLoss(projected)
        parameters = [*self.encoder.parameters(), *self.loss_fn.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=0.01)
        self.sampler = UnevenParts(ITEMS, batch_size=BATCH, seed=3)
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        parts = {name: getattr(self, name).state_dict() for name in ("encoder", "loss_fn", "optimizer")}
        position = self.sampler.state_dict(step=self.steps - len(self.sampler) * self.sampler.epoch)
        return {**parts, "sampler": position, "random": torch.get_rng_state(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part in ("encoder", "loss_fn", "optimizer", "sampler"):
            getattr(self, part).load_state_dict(state[part])
        torch.set_rng_state(state["random"])
        self.steps = state["steps"]

    def run(self, until: int) -> Iterator[float]:
        while self.steps < until:
            self.sampler.set_epoch(self.steps // len(self.sampler))
            for indices in self.sampler:
                if self.steps == until:
                    return
                self.optimizer.zero_grad()
                z = self.encoder(self.images[indices] + 0.1 * self.noise(indices))
                value = self.loss_fn(z, self.labels[indices]) + 0.1 * self.random_loss(z)
                value.backward()
                cz.average_gradients(self.encoder)
                self.optimizer.step()
                self.steps += 1
                yield value.item()

    def noise(self, indices: list[int]) -> Tensor:
        """An augmentation of each sample: a function of the sample and the epoch, whichever rank draws it."""
        keys = random_keys(5, self.sampler.epoch, torch.tensor(indices, dtype=torch.int64)[:, None], torch.arange(6))
        return torch.from_numpy(keys.astype(float)) / 2**63 - 1


def projected(embeddings: Tensor) -> Tensor:
    return (embeddings @ torch.randn(4, 3, dtype=embeddings.dtype)).square().mean()


def train_until(seed: int, until: int, *, save: Path, load: Path | None = None) -> list[float]:
    """The losses on this rank, whose random numbers are its own; those of rank 0 count, and rank 0 saves the end."""
    training = Training()
    torch.manual_seed(seed + dist.get_rank())
    if load is not None:
        training.load_state_dict(torch.load(load, weights_only=True))
    values = list(training.run(until))
    if dist.get_rank() == 0:
        torch.save(training.state_dict(), save)
    return values


def test_a_restart_on_fewer_ranks_continues_the_training(worlds: Worlds, tmp_path: Path) -> None:
    whole, checkpoint, end = (tmp_path / name for name in ("whole", "checkpoint", "end"))
    (expected,) = worlds.run(1, train_until, 0, ALL_STEPS, save=whole)
    for values in worlds.run(4, train_until, 0, SAVED, save=checkpoint):
        assert values == pytest.approx(expected[:SAVED], rel=1e-9)
    for values in worlds.run(2, train_until, 100, ALL_STEPS, save=end, load=checkpoint):
        assert values == pytest.approx(expected[SAVED:], rel=1e-9)
    states = [torch.load(path, weights_only=True) for path in (end, whole)]
    assert states[0].pop("sampler") == states[1].pop("sampler")
    torch.testing.assert_close(*states, rtol=1e-9, atol=1e-9)
    (forgetful,) = worlds.run(1, train_until, 1, 2, save=end)  # the mutant: other random numbers
    assert forgetful != pytest.approx(expected[:2], rel=1e-6)
