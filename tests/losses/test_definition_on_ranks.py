"""The plain definition of every loss, ``plain_formulas()``, is computed on two ranks, of which one may have no samples."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import close, split
from tests.losses.test_settings import SUBJECTS

PARTS = 4
"""Jobs of a world, so that one that hangs says which losses it holds."""


def outcomes(names: list[str], shards: tuple[int, ...] | None = None) -> list[list[Tensor]]:
    """Return value and gradients of the local embeddings, as DDP averages them."""
    found = []
    for name in names:
        torch.manual_seed(0)
        loss, every = SUBJECTS[name]().double(), SUBJECTS[name].rows
        rows = [(x if shards is None else split(x, shards)[dist.get_rank()]).detach().clone() for x in every]
        learns = [x.requires_grad_() for x in rows if x.is_floating_point()]
        with cz.engine.plain_formulas():
            value = (loss if shards is None else cz.DistributedLoss(loss))(*rows)
            gradients = torch.autograd.grad(value, learns, allow_unused=True, materialize_grads=True)
        found.append([value.detach(), *(x / (1 if shards is None else len(shards)) for x in gradients)])
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_the_definition_is_that_of_one_process(part: int, worlds: Worlds) -> None:
    names = list(SUBJECTS)[part::PARTS]
    expected = outcomes(names)
    for shards in ((8, 0), (0, 8), (3, 5)):
        ranks = worlds.run(2, outcomes, names, shards, timeout=30.0)
        for index, (value, *gradients) in enumerate(expected):
            for rank in ranks:
                close(rank[index][0], value)
            for place, gradient in enumerate(gradients):
                close(torch.cat([rank[index][1 + place] for rank in ranks]), gradient)
