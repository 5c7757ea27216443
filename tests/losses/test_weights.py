"""Proxies and classifiers: other people's code, numbers by hand, replicated and sharded weights."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.engine.classes import class_shard, draw_weights
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.invariants import CONTRACT, same_sharded_gradient, scales_with_grad_output
from contrastive_zoo.testing.measurement import Case, Trial
from contrastive_zoo.testing.worlds import Worlds
from tests.losses.test_statistics import close


def with_weights(cls: type[cz.ClassLoss], weights: Tensor, **settings: Any) -> cz.ClassLoss:
    loss = cls(len(weights), weights.shape[-1], **settings)
    loss.weights = torch.nn.Parameter(weights.detach())
    return loss


def labelled(seed: int, n: int = 9, d: int = 4, classes: int = 5) -> tuple[Tensor, Tensor]:
    """Uneven classes, a singleton, duplicated embeddings, a class without any."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(n, d, dtype=torch.float64, generator=generator)
    z[1] = z[0]
    labels = torch.randint(classes - 1, (n,), generator=generator)
    labels[-1] = classes - 1
    return z.requires_grad_(), labels


CLASSES = 64  # more than the labels that are drawn
SHARDED: dict[str, Callable[[cz.World], cz.ClassLoss]] = {
    "NormalizedSoftmax": lambda world: cz.NormalizedSoftmax(CLASSES, 4, shard_over=world, temperature=0.3),
    "learnt temperature": lambda world: cz.NormalizedSoftmax(
        CLASSES, 4, shard_over=world, temperature=cz.LearnableTemperature(0.3)
    ),
    "CosFace": lambda world: cz.CosFace(CLASSES, 4, shard_over=world, scale=8.0),
    "ProxyNCA": lambda world: cz.ProxyNCA(CLASSES, 4, shard_over=world),
    "ArcFace": lambda world: cz.ArcFace(CLASSES, 4, shard_over=world, sub_centers=2, scale=8.0),
}


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("trainer", ["mean", "sum"])
@pytest.mark.parametrize("shards", [(7,), (2, 5), (3, 0, 4)], ids=str)
def test_dealt_out_weights_are_those_of_one_process(name, trainer, shards, worlds: Worlds) -> None:
    make = SHARDED[name]
    case = Case(lambda: cz.DistributedLoss(make(cz.World.of()), grad_reduction=trainer), "labels", trainer)
    trial = Trial(case, GlobalBatch(shards, d=4, seed=5), worlds)
    for invariant in (*CONTRACT, scales_with_grad_output):
        invariant(trial)
    assert same_sharded_gradient(trial) or len(shards) == 1


def test_a_rank_may_hold_no_class(worlds: Worlds) -> None:
    def job(z: Tensor, labels: Tensor, weights: Tensor) -> tuple[float, Tensor]:
        rank = cz.World.of().rank
        own = (weights[:1], weights[1:1], weights[1:])[rank]
        loss = cz.NormalizedSoftmax(3, 4, shard_over=cz.World.of())
        loss.weights = torch.nn.Parameter(own.clone())
        value = loss(z[rank::3], labels[rank::3], world=cz.World.of())
        value.backward()
        return value.item(), loss.weights.grad

    weights = torch.randn(3, 4, dtype=torch.float64)
    z, labels = labelled(0, classes=3)
    alone = with_weights(cz.NormalizedSoftmax, weights)
    expected = alone(z, labels)
    found = worlds.run(3, job, z.detach(), labels, weights)
    close([value for value, _ in found], [expected.item()] * 3)
    close(torch.cat([own for _, own in found]), torch.autograd.grad(expected, alone.weights)[0])


@pytest.mark.parametrize("classes", [8, 9, 10])
def test_every_split_of_the_classes_draws_the_same_weights(classes: int, monkeypatch) -> None:
    """More of them than are drawn at a time."""
    monkeypatch.setattr("contrastive_zoo.engine.classes._CLASSES_PER_DRAW", 3)

    def drawn(local: slice) -> Tensor:
        torch.manual_seed(0)
        return draw_weights(classes, 2, local=local)

    whole = drawn(slice(0, classes))
    assert len(whole.unique()) == 2 * classes
    for size in (2, 3, 5):
        shards = [drawn(class_shard(classes, cz.World(rank, size))) for rank in range(size)]
        assert torch.equal(torch.cat(shards), whole)


def test_a_learnt_temperature_is_that_of_one_panel(monkeypatch) -> None:
    z, labels = labelled(0)
    found = []
    for block_bytes in (2**25, 500):
        monkeypatch.setattr("contrastive_zoo.engine.tiling.BLOCK_BYTES", block_bytes)
        weights, t = torch.ones(5, 4, dtype=torch.float64).tril_(), torch.tensor(0.3, dtype=torch.float64)
        loss = with_weights(cz.NormalizedSoftmax, weights, temperature=t.requires_grad_())
        value = loss(z, labels)
        found.append([value, *torch.autograd.grad(value, (z, loss.weights, t))])
    close(*found)


def test_a_sharded_loss_can_be_copied_and_saved(worlds: Worlds) -> None:
    def job() -> tuple[str, bool]:
        loss = cz.ArcFace(5, 4, shard_over=cz.World.of(torch.distributed.new_group()))
        return repr(copy.deepcopy(loss)), torch.equal(pickle.loads(pickle.dumps(loss)).weights, loss.weights)

    for text, is_equal in worlds.run(2, job):
        assert "shard_over=World(" in text
        assert is_equal
