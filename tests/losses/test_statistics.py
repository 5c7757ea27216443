"""Feature statistics, clusters and teachers: numbers by hand, state."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.ranks.world import World
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.worlds import Worlds
from tests.test_operators import Operators


def close(ours: Any, theirs: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def views(seed: int, count: int = 2, n: int = 7, d: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, n, d, dtype=torch.float64, generator=generator)
    x[:, 1] = x[:, 0]
    return [view.clone().requires_grad_() for view in x]


def test_dino_moves_its_centre_while_training() -> None:
    teacher = torch.tensor([[[1.0, 2.0], [5.0, 6.0]], [[3.0, 4.0], [7.0, 8.0]]])
    loss = cz.DINO(2, centre_momentum=0.75)
    loss(torch.zeros(2, 3, 2), teacher)
    close(loss.centre, torch.tensor([1.0, 1.25]))
    loss.eval()(torch.zeros(2, 2), teacher[:, 0])
    close(loss.centre, torch.tensor([1.0, 1.25]))
    other = cz.DINO(2)
    other.load_state_dict(loss.state_dict())
    close(other.centre, loss.centre)


@pytest.mark.parametrize("dense", [False, True], ids=["blocks", "dense"])
def test_koleo_keeps_the_digits_of_near_neighbours(dense: bool) -> None:
    """Of neighbours 1e-4 apart a matmul in float32 keeps no digit of the distance."""
    generator = torch.Generator().manual_seed(0)
    far = torch.randn(6, 5, generator=generator)
    rows = torch.cat([far, far + 1e-4 * torch.randn(6, 5, generator=generator)])
    single, double = rows.clone().requires_grad_(), rows.double().requires_grad_()
    with cz.engine.plain_formulas() if dense else torch.enable_grad():
        for z in (single, double):
            cz.KoLeo(normalize=False).double()(z).backward()
    assert single.grad is not None
    torch.testing.assert_close(single.grad.double(), double.grad, rtol=1e-5, atol=0.0)


def test_a_number_of_prototypes_in_a_tensor_has_16_bits() -> None:
    """Eight bits do not hold 4,096, the number of prototypes that are drawn at a time."""
    assert cz.SwAV(torch.tensor(39, dtype=torch.int32), 3).prototypes.shape == (39, 3)


BATCHED: dict[str, tuple[Callable[[], Any], int, int]] = {
    "SwAV": (lambda: cz.SwAV(5, 4), 8, 130),
    "LeJEPA": (lambda: cz.LeJEPA(4), 3, 110),
}
"""A loss of views, its messages until its value, the handshake included, and a bound of its operators with gradients."""


@pytest.mark.parametrize("name", BATCHED)
def test_views_share_messages_and_operators(name: str, worlds: Worlds) -> None:
    """By itself each view would take six messages of SwAV, and one message and 300 operators of LeJEPA."""
    make, messages, most = BATCHED[name]
    shards, rows = [slice(0, 4), slice(4, 9)], views(3, count=4, n=9)

    def job(count: int) -> int:
        torch.manual_seed(0)  # of prototypes
        loss = cz.DistributedLoss(make().double())
        local = [x.detach()[shards[dist.get_rank()]].clone().requires_grad_() for x in rows[:count]]
        with splitting(always=True), patch.object(World, "start", autospec=True, side_effect=World.start) as start:
            loss(*local)
        return start.call_count

    for count in (2, 4):
        assert worlds.run(2, job, count) == [messages] * 2
    loss = make().double()
    loss.check_finite = False  # each view is checked by itself
    with Operators() as found:
        torch.autograd.grad(loss(*rows), [*rows, *loss.parameters()])
    assert len(found.names) <= most, len(found.names)
