"""A step that is compiled whole is the step: the graph breaks off at losses and messages, and goes on after them."""

import gc

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses, miners
from torch import nn

import contrastive_zoo as cz
from contrastive_zoo.compiling import uncompiled
from contrastive_zoo.testing.worlds import Worlds
from contrastive_zoo.world import World

ENTRANCES = [getattr(cz, name) for name in cz.__all__ if name[:1].islower()] + [
    kind.forward for name in cz.__all__ if isinstance(kind := getattr(cz, name), type) and issubclass(kind, nn.Module)
]
TRACED = {cz.LearnableTemperature.forward, cz.MomentumEncoder.forward, cz.MemoryQueue.forward, cz.GradCache.forward,
          cz.cached_step, cz.dense, cz.memory_budget, cz.pair_masks, cz.sample_ids, cz.recall_at_k}  # fmt: skip
"""Arithmetic, and what calls encoders, which are compiled."""


@pytest.mark.parametrize("function", [*ENTRANCES, cz.MemoryQueue.enqueue], ids=lambda f: f.__qualname__)
def test_every_loss_and_message_is_left_alone(function) -> None:
    left_alone = function.__code__ is uncompiled(len).__code__
    assert left_alone != (function in TRACED)


def plain(a, b):
    return (a * b).sum()


@pytest.mark.parametrize(
    ("function", "graphs"), [(plain, 1), (uncompiled(plain), 0), (cz.nt_xent, 0), (cz.NTXent(), 0)]
)
def test_the_compiler_sees_nothing_of_what_is_left_alone(function, graphs) -> None:
    found = []
    torch._dynamo.reset()
    compiled = torch.compile(lambda *views: function(*views), backend=lambda graph, _: found.append(graph) or graph)
    compiled(torch.eye(2), torch.eye(2))
    torch._dynamo.reset()
    assert len(found) == graphs


def nt_xent():
    return cz.DistributedLoss(cz.NTXent(temperature=cz.LearnableTemperature(0.5)))


def around():
    return cz.DistributedLoss(cz.Clip(), ring=True)


def foreign():
    return cz.DistributedLoss(losses.TripletMarginLoss(), miner=miners.MultiSimilarityMiner())


def sharded():
    return cz.DistributedLoss(losses.MultiSimilarityLoss(), mode="sharded")


class ByFunction(nn.Module):
    def forward(self, a, b):
        return cz.nt_xent(a, b, world=World.of())


class ByHand(nn.Module):
    def forward(self, z, labels):
        z, labels = cz.all_gather(z), cz.all_gather(labels)
        return z[labels == 0].square().sum() + cz.all_reduce(z.sum(0)).square().sum()


LABELLED = (foreign, sharded, ByHand)


@pytest.mark.parametrize("make", [nt_xent, around, foreign, sharded, ByFunction, ByHand])
def test_a_compiled_step_on_two_ranks(make, worlds: Worlds) -> None:
    for expected, found in worlds.run(2, plain_and_compiled, make):
        assert expected == found


def plain_and_compiled(make) -> list[list[list[float]]]:
    """Values and gradients of three steps each."""
    rank = dist.get_rank()
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        encoder, loss = nn.Linear(4, 5), make()
        draw = torch.Generator().manual_seed(rank)
        x, y = torch.randn(2, 3 + 2 * rank, 4, generator=draw)

        def step(x, y, encoder=encoder, loss=loss):
            z = encoder(x)
            return 2 * loss(z, torch.arange(len(z)) % 2 if make in LABELLED else encoder(y))

        step = torch.compile(step, backend="eager") if compiled else step
        found = []
        for _ in range(3):
            encoder.zero_grad()
            loss.zero_grad()
            value = step(x, y)
            value.backward()
            learnt = [*encoder.parameters(), *loss.parameters()]
            found.append([value.item(), *torch.cat([p.grad.flatten() for p in learnt]).tolist()])
        results.append(found)
    torch._dynamo.reset()
    gc.collect()
    return results
