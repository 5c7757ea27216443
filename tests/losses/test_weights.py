"""Weights of classes that are split over ranks."""

import copy
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.engine.classes import class_shard, draw_weights
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.invariants import CONTRACT, same_sharded_gradient, scales_with_grad_output
from contrastive_zoo.testing.measurement import Case, Trial
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import drawn

CLASSES = 64  # more than the labels that are drawn
SMOOTHED = {"label_smoothing": 0.2}
SHARDED: dict[str, Callable[..., cz.ClassLoss]] = {
    "NormalizedSoftmax": partial(cz.NormalizedSoftmax, CLASSES, 4, temperature=0.3),
    "fewer classes than ranks": partial(cz.NormalizedSoftmax, 2, 4),
    "learnt temperature": lambda **of: cz.NormalizedSoftmax(CLASSES, 4, temperature=cz.LearnableTemperature(0.3), **of),
    "CosFace": partial(cz.CosFace, CLASSES, 4, **SMOOTHED, scale=8.0),
    "a part of the classes": partial(cz.CosFace, CLASSES, 4, scale=8.0, sample_rate=0.3),
    "classes of the labels": partial(cz.CurricularFace, CLASSES, 4, scale=8.0, sample_rate=0.01),
    "ProxyNCA": partial(cz.ProxyNCA, CLASSES, 4),
    "ArcFace": partial(cz.ArcFace, CLASSES, 4, sub_centers=2, scale=8.0),
    "MagFace": partial(cz.MagFace, CLASSES, 4, low_norm=1.0, high_norm=3.0, scale=8.0),
    "AdaFace": partial(cz.AdaFace, CLASSES, 4, momentum=0.5, scale=8.0),
    "CurricularFace": partial(cz.CurricularFace, CLASSES, 4, **SMOOTHED, momentum=0.5, sub_centers=2, scale=8.0),
}
CASES = drawn(SHARDED, ["mean", "sum"], [(7,), (2, 5), (3, 0, 4)], one_in=3)


@pytest.mark.parametrize(("name", "trainer", "shards"), CASES, ids=str)
def test_dealt_out_weights_are_those_of_one_process(name, trainer, shards, worlds: Worlds) -> None:
    make, labels = SHARDED[name], "same" if name == "fewer classes than ranks" else "mixed"
    case = Case(lambda: cz.DistributedLoss(make(shard_over=cz.World.of()), grad_reduction=trainer), "labels", trainer)
    trial = Trial(case, GlobalBatch(shards, d=4, seed=5, labels=labels), worlds)
    for invariant in (*CONTRACT, scales_with_grad_output):
        invariant(trial)
    assert same_sharded_gradient(trial) or len(shards) == 1


@pytest.mark.parametrize("classes", [8, 9, 10])
def test_every_split_of_the_classes_draws_the_same_weights(classes: int, monkeypatch) -> None:
    """More of them than are drawn at a time."""
    monkeypatch.setattr("contrastive_zoo.engine.classes._CLASSES_PER_DRAW", 3)

    def weights_of(local: slice) -> Tensor:
        torch.manual_seed(0)
        return draw_weights(classes, 2, local=local)

    whole = weights_of(slice(0, classes))
    assert len(whole.unique()) == 2 * classes
    for size in (2, 3, 5):
        shards = [weights_of(class_shard(classes, cz.World(rank, size))) for rank in range(size)]
        assert torch.equal(torch.cat(shards), whole)


def test_a_sharded_loss_can_be_copied_and_saved(worlds: Worlds) -> None:
    def job() -> tuple[str, bool]:
        loss = cz.ArcFace(5, 4, shard_over=cz.World.of(torch.distributed.new_group()))
        return repr(copy.deepcopy(loss)), torch.equal(pickle.loads(pickle.dumps(loss)).weights, loss.weights)

    for text, is_equal in worlds.run(2, job):
        assert "shard_over=World(" in text
        assert is_equal
