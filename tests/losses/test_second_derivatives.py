"""Penalties of gradients: of all ranks' embeddings under ``plain_formulas()``; refused of a trainer's gradients."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import close, error_message, numbers

LABELS = torch.tensor([0, 1, 0, 2, 1, 0])


def cubic(z: Tensor, labels: Tensor) -> Tensor:
    return (z @ z.T).pow(3).mean() + 0 * labels.sum()


SAMPLES = numbers(len(LABELS), 3, seed=1)


def penalised(
    value: Callable[[Tensor, Tensor], Tensor], bare: Callable[[Tensor, Tensor], Tensor], x: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    encoder = numbers(3, 4, seed=0).requires_grad_()
    z = x @ encoder
    with cz.engine.plain_formulas():
        (gradient,) = torch.autograd.grad(bare(z, labels), z, create_graph=True)
        penalty = (gradient.square().sum(1).sqrt() - 1).square().mean()
        first = value(z, labels)
    (first + penalty).backward()
    assert encoder.grad is not None
    return (first + penalty).detach(), encoder.grad


BARE: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "own": (cz.SupCon(), lambda z, labels: cz.SupCon()(z, labels, world=cz.World.of())),
    "third-party": (
        cubic,
        lambda z, labels: cubic(cz.collectives.all_gather(z, gradient="complete"), cz.collectives.all_gather(labels)),
    ),
}
"""A loss, and the same of all ranks' embeddings as the error of ``create_graph=True`` says to take it."""


@pytest.mark.parametrize("name", BARE)
def test_a_gradient_penalty_is_that_of_one_process(name: str, worlds: Worlds) -> None:
    loss, bare = BARE[name]

    def job() -> tuple[Tensor, Tensor]:
        half = slice(3 * dist.get_rank(), 3 * dist.get_rank() + 3)
        return penalised(cz.DistributedLoss(loss), bare, SAMPLES[half], LABELS[half])

    value, gradient = penalised(loss, loss, SAMPLES, LABELS)
    ranks = worlds.run(2, job)
    close(torch.stack([x for x, _ in ranks]).mean(), value)
    close(torch.stack([x for _, x in ranks]).mean(0), gradient)


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("name", BARE)
def test_gradients_for_a_trainer_are_not_differentiated_again(name: str, splits: bool, worlds: Worlds) -> None:
    def job() -> str | None:
        z = numbers(3, 4, seed=dist.get_rank()).requires_grad_()
        with splitting(always=splits):
            value = cz.DistributedLoss(BARE[name][0])(z, LABELS[:3])
            return error_message(lambda: torch.autograd.grad(value, z, create_graph=True))

    assert all("a penalty of them would be W² times too large" in (text or "") for text in worlds.run(2, job))
