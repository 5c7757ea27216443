"""One handshake opens a step of any loss of this library, and there is no other one in it."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

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
from tests.helpers import drawn
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
