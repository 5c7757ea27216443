"""Ranks with different numbers of batches: DDP's join() is refused, empty batches are not."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import error_message, numbers, refused


def step(context: Callable[[Any], Any] = lambda model: nullcontext(), *, warm: bool = False) -> Tensor:
    """Return the loss of a DDP module inside of a context, after a step outside of it if ``warm``."""
    torch.manual_seed(0)
    model, loss_fn = DistributedDataParallel(nn.Linear(3, 2)), cz.DistributedLoss(cz.NTXent())
    rank = torch.distributed.get_rank()
    for is_last in (False, True) if warm else (True,):
        with context(model) if is_last else nullcontext():
            rows = torch.cat([numbers(2, 3, seed=rank), numbers(2, 3, seed=9 + rank)]).float()
            value = loss_fn(*model(rows).chunk(2))
            value.backward()
    return value.detach()


CONTEXTS: dict[str, Callable[[Any], Any]] = {
    "join()": lambda model: model.join(),
    "Join": lambda model: Join([model], throw_on_early_termination=True),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_loss_inside_of_join_is_refused_on_every_rank(name: str, worlds: Worlds) -> None:
    words = "NTXent: DDP's join() is active. A rank that has run out of batches answers DDP's messages"
    for warm in (False, True):
        refused(worlds, 2, lambda warm=warm: step(CONTEXTS[name], warm=warm), words)


def around_a_join() -> list[Tensor]:
    """Steps in a context that is not enabled, and after one that has ended, with or without an error."""
    found = [step(lambda model: model.join(enable=False))]
    assert error_message(lambda: step(CONTEXTS["join()"]))
    with DistributedDataParallel(nn.Linear(3, 2)).join():
        pass
    return [*found, step()]


def test_a_loss_outside_of_join_is_computed(worlds: Worlds) -> None:
    for found in worlds.run(2, around_a_join):
        assert torch.stack(found).isfinite().all()
