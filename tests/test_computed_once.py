"""A loss is computed once in a step, also with hooks."""

from typing import Any

import pytest
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import local_shard, numbers

STEPS = [(3, 2), (0, 4), (700, 900), (5, 0), (1, 1)]
"""Small batches, of which every rank computes all, and a large one, which they split."""


def rows_of(step: int, total: int) -> list[Tensor]:
    return [numbers(total, 4, seed=10 * step + i) for i in range(2)]


class Counted(cz.NTXent):
    """Counts how often its formula runs."""

    computed = 0

    def compute(self, batch: Any) -> Tensor:
        self.computed += 1
        return super().compute(batch)


def computed(*, hooked: bool) -> list[int]:
    """How often the formula of a loss, and that of a member of a sum, runs in each step."""
    loss, member, counts = Counted(temperature=0.3), Counted(temperature=0.2), []
    if hooked:
        loss.register_forward_hook(lambda *_: None)
    wrapped = cz.DistributedLoss(cz.WeightedSum([loss, member, cz.InfoNCE()]))
    for step, shards in enumerate(STEPS):
        before = loss.computed, member.computed
        wrapped(*(local_shard(x, shards) for x in rows_of(step, sum(shards))))
        counts += [loss.computed - before[0], member.computed - before[1]]
    return counts


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
            wrapped(*(local_shard(x, shards) for x in rows_of(step, sum(shards))))
        return seen

    assert worlds.run(2, job) == [[sum(shards) for shards in STEPS]] * 2
