"""A loss is computed once in a step: from the local rows, or from those of all ranks, also with hooks or an own forward."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EXACT, distance, local_shard, numbers

STEPS = [(3, 2), (0, 4), (700, 900), (5, 0), (1, 1)]
"""Small batches, of which every rank computes all, and a large one, which they split."""


def doubled(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
    """A hook that passes other tensors than the caller's."""
    return tuple(2 * x for x in args), kwargs


class BothOrders(cz.NTXent):
    """Two losses in one call, by a forward of its own."""

    def forward(self, *views: Tensor, world: Any = None) -> Tensor:
        return super().forward(*views, world=world) + 2 * super().forward(*views[::-1], world=world)


def made(kind: str) -> Loss:
    loss = {
        "NTXent": lambda: cz.NTXent(temperature=0.3),
        "three views": lambda: cz.NTXent(temperature=0.3),
        "Clip": lambda: cz.Clip(temperature=cz.LearnableTemperature(0.3)),
        "SigLIP": cz.SigLIP,
        "negatives": lambda: cz.InfoNCE(temperature=0.3),
        "without unit rows": lambda: cz.InfoNCE(temperature=3.0, normalize=False, symmetric=True),
        "one tensor twice": lambda: cz.InfoNCE(temperature=0.3),
        "both orders": lambda: BothOrders(temperature=0.3),
        "hook": lambda: cz.InfoNCE(temperature=3.0, normalize=False),
        "sum": lambda: cz.WeightedSum([cz.NTXent(temperature=0.3), cz.Clip()]),
    }[kind]()
    if kind == "hook":
        loss.register_forward_pre_hook(doubled, with_kwargs=True)
    return loss


def arguments(kind: str, step: int, total: int) -> list[Tensor]:
    count = {"three views": 3, "negatives": 3, "one tensor twice": 1}.get(kind, 2)
    return [numbers(total, 4, seed=10 * step + i) for i in range(count)]


def deviations(kind: str, grad_reduction: Any) -> list[float]:
    """The largest deviation from one process at each step: value, this rank's gradients, those of parameters."""
    torch.set_default_dtype(torch.float64)
    loss, alone = made(kind), made(kind)
    wrapped, found = cz.DistributedLoss(loss, grad_reduction=grad_reduction), []
    factor = dist.get_world_size() if grad_reduction == "mean" else 1
    for step, shards in enumerate(STEPS):
        whole = [x.requires_grad_() for x in arguments(kind, step, sum(shards))]
        own = [local_shard(x.detach(), shards).requires_grad_() for x in whole]
        twice = 2 if kind == "one tensor twice" else 1
        values = wrapped(*own * twice), alone(*whole * twice, world=cz.World())
        for module, value in zip((loss, alone), values, strict=True):
            module.zero_grad()
            value.backward()
        expected = [factor * local_shard(x.grad, shards) for x in whole]
        gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in own]
        pairs = [values, *zip(gradients, expected, strict=True)]
        parameters = zip(loss.parameters(), alone.parameters(), strict=True)
        pairs += [(x.grad * (dist.get_world_size() / factor), y.grad) for x, y in parameters]
        found.append(max(distance(x, y) for x, y in pairs))
    return found


KINDS = [
    "NTXent",
    "three views",
    "Clip",
    "SigLIP",
    "negatives",
    "without unit rows",
    "one tensor twice",
    "both orders",
    "hook",
    "sum",
]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_same_function_at_every_step(worlds: Worlds, kind: str) -> None:
    for found in worlds.run(2, deviations, kind, "mean"):
        assert max(found) < EXACT, found


@pytest.mark.parametrize("kind", ["Clip", "hook"])
def test_it_is_the_same_function_for_a_trainer_that_sums(worlds: Worlds, kind: str) -> None:
    for found in worlds.run(2, deviations, kind, "sum"):
        assert max(found) < EXACT, found


class Counted(cz.NTXent):
    """Counts how often its formula runs."""

    computed = 0

    def compute(self, batch: Any) -> Tensor:
        self.computed += 1
        return super().compute(batch)


def computed(*, hooked: bool) -> list[int]:
    """How often the formula of a loss, and that of a member of a sum, runs in each step."""
    loss, member, found = Counted(temperature=0.3), Counted(temperature=0.2), []
    if hooked:
        loss.register_forward_hook(lambda *_: None)
    wrapped = cz.DistributedLoss(cz.WeightedSum([loss, member, cz.InfoNCE()]))
    for step, shards in enumerate(STEPS):
        before = loss.computed, member.computed
        wrapped(*(local_shard(x, shards) for x in arguments("NTXent", step, sum(shards))))
        found += [loss.computed - before[0], member.computed - before[1]]
    return found


@pytest.mark.parametrize("hooked", [False, True])
def test_a_formula_runs_once_in_a_step(worlds: Worlds, hooked: bool) -> None:
    assert worlds.run(2, computed, hooked=hooked) == [[1, 1] * len(STEPS)] * 2


def test_a_hook_that_mixes_rows_sees_those_of_all_ranks(worlds: Worlds) -> None:
    def job() -> list[int]:
        seen: list[int] = []
        loss = cz.NTXent()
        loss.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
        wrapped = cz.DistributedLoss(loss)
        for step, shards in enumerate(STEPS):
            wrapped(*(local_shard(x, shards) for x in arguments("NTXent", step, sum(shards))))
        return seen

    assert worlds.run(2, job) == [[sum(shards) for shards in STEPS]] * 2
