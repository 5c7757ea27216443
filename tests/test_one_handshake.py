"""A step of any loss of this library has one handshake and computes the formula once, also with hooks."""

from collections import Counter
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.loss_base.families import TwoViewLoss
from contrastive_zoo.ranks.messages import begun_handshake
from contrastive_zoo.ranks.session import agree_on_shards
from contrastive_zoo.testing.worlds import Worlds
from contrastive_zoo.wrapper.step import splitting
from tests.helpers import drawn, local_shard, numbers
from tests.own_losses import OWN_LOSSES, OwnLoss
from tools.vectors.cases import VIEWS

WHOLE = drawn(OWN_LOSSES, (False,), one_in=6)


def in_a_step(case: OwnLoss, *, in_parts: bool) -> int:
    """Return the number of handshakes of a rank in a forward and backward pass."""
    torch.manual_seed(0)
    loss = cz.DistributedLoss(case.make(), check_distinct=False).double()
    arguments = case.arguments(dist.get_rank(), dist.get_world_size())
    with (
        splitting(always=in_parts),
        patch("contrastive_zoo.ranks.handshake.begun_handshake", wraps=begun_handshake) as handshakes,
    ):
        loss(*arguments.values()).sum().backward()
    return handshakes.call_count


def test_every_step_has_one(worlds: Worlds) -> None:
    """A batch that ranks compute in parts has; so has one that every rank computes whole, in a part of the cases."""
    table = dict.fromkeys([*drawn(OWN_LOSSES, (True,), one_in=1), *WHOLE], 1)

    def job() -> dict[tuple[str, bool], int]:
        return {key: in_a_step(OWN_LOSSES[key[0]], in_parts=key[1]) for key in table}

    assert worlds.run(2, job) == [table] * 2


class ShakesHandsTwice(TwoViewLoss):
    """A formula with a handshake of its own."""

    def compute(self, batch: Batch) -> Tensor:
        agree_on_shards("ShakesHandsTwice", batch.rows, world=batch.world)
        return batch.first.sum()


def test_a_second_one_is_counted(worlds: Worlds) -> None:
    found = worlds.run(2, lambda: in_a_step(OwnLoss(ShakesHandsTwice, VIEWS), in_parts=True))
    assert Counter(found) == {2: 2}


# ---------------------------------------------------------------------------------------------------------- one formula

STEPS = [(3, 2), (0, 4), (700, 900), (5, 0), (1, 1)]
"""Small batches, of which every rank computes all, and a large one, which they split."""


class Counted(cz.NTXent):
    """Counts how often its formula runs."""

    computed = 0

    def compute(self, batch: Batch) -> Tensor:
        self.computed += 1
        return super().compute(batch)


def computed(*, hooked: bool) -> list[int]:
    """How often the formula of a loss, and that of a member of a sum, runs in each step."""
    loss, member, counts = Counted(temperature=0.3), Counted(temperature=0.2), []
    if hooked:
        loss.register_forward_hook(lambda *_: None)
    wrapped = cz.DistributedLoss(cz.WeightedSum([loss, member, cz.InfoNCE()]))
    for step, shards in enumerate(STEPS):
        loss.computed = member.computed = 0
        wrapped(*(local_shard(numbers(sum(shards), 4, seed=10 * step + i), shards) for i in range(2)))
        counts += [loss.computed, member.computed]
    return counts


@pytest.mark.parametrize("hooked", [False, True])
def test_a_formula_runs_once_in_a_step(worlds: Worlds, hooked: bool) -> None:
    assert worlds.run(2, computed, hooked=hooked) == [[1, 1] * len(STEPS)] * 2
