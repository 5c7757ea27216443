"""Ranks with different numbers of batches: DDP's join() is refused, empty batches are not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import error_message, numbers, refused


class Training:
    """A DDP module and a loss."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.loss_fn = DistributedDataParallel(nn.Linear(3, 2)), cz.DistributedLoss(cz.NTXent())

    def step(self) -> Tensor:
        rank = torch.distributed.get_rank()
        a, b = self.model(torch.cat([numbers(2, 3, seed=rank), numbers(2, 3, seed=9 + rank)]).float()).chunk(2)
        value = self.loss_fn(a, b)
        value.backward()
        return value.detach()


def joined(context: Callable[[Training], Any], *, warm: bool = False) -> None:
    """A step inside of a context, after one outside of it if ``warm``."""
    training = Training()
    if warm:
        training.step()
    with context(training):
        training.step()


CONTEXTS: dict[str, Callable[[Training], Any]] = {
    "join()": lambda training: training.model.join(),
    "Join": lambda training: Join([training.model], throw_on_early_termination=True),
}


@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("warm", [False, True], ids=["first call", "later call"])
def test_a_loss_inside_of_join_is_refused_on_every_rank(name: str, warm: bool, worlds: Worlds) -> None:
    words = "NTXent: DDP's join() is active. A rank that has run out of batches answers DDP's messages"
    refused(worlds, 2, lambda: joined(CONTEXTS[name], warm=warm), words)


def around_a_join() -> list[Tensor]:
    """Steps in a context that is not enabled, and after one that has ended, with or without an error."""
    training = Training()
    with training.model.join(enable=False):
        found = [training.step()]
    assert error_message(lambda: joined(CONTEXTS["join()"]))
    with training.model.join():
        pass
    return [*found, Training().step()]


def test_a_loss_outside_of_join_is_computed(worlds: Worlds) -> None:
    for found in worlds.run(2, around_a_join):
        assert torch.stack(found).isfinite().all()
