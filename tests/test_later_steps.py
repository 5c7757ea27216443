"""What a training meets after its first step: gathered rows, losses that draw, checkpoints, subgroups."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import contrastive_zoo as cz
from contrastive_zoo.ranks.world import World
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import close, common_error, error_message, groups, numbers

D = 3
SAME = numbers(4, D, seed=1)


def rank() -> int:
    return dist.get_rank()


def z(n: int = 4, seed: int = 0) -> Tensor:
    """Other embeddings on each rank."""
    return numbers(n, D, seed=100 * seed + rank()).requires_grad_()


def test_one_tensor_as_both_arguments(worlds: Worlds) -> None:
    def job() -> tuple[Tensor, Tensor]:
        x, loss = z(), cz.DistributedLoss(cz.InfoNCE(temperature=0.3))
        values = torch.stack([loss(x, x) for _ in range(3)])
        return values.detach(), torch.autograd.grad(values.sum() / 3, x)[0] / dist.get_world_size()

    whole = torch.cat([numbers(4, D, seed=rank) for rank in range(2)]).requires_grad_()
    value = cz.InfoNCE(temperature=0.3)(whole, whole)
    values, gradients = zip(*worlds.run(2, job), strict=True)
    close(torch.stack(values), value.detach().expand(2, 3))
    close(torch.cat(gradients), torch.autograd.grad(value, whole)[0])


class DrawingOnRank1(cz.RowLoss):
    """A user's loss whose candidates need random numbers, on one rank or on both."""

    of_all: bool = False

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        if rank() == 1 or self.of_all:
            torch.rand(())
        return (similarity * negative).sum(1), negative.any(1)


def after_a_validation() -> None:
    loss = cz.DistributedLoss(cz.NTXent())
    with torch.no_grad():
        loss(z(), z(seed=5))
    loss(SAME, SAME + 1)


def in_a_checkpoint(*, reentrant: bool) -> None:
    loss = cz.DistributedLoss(cz.CrossBatchMemory(cz.InfoNCE(), 8, D))
    checkpoint(loss, z().float(), z(seed=1).float(), use_reentrant=reentrant).backward()


def drawing(*, of_all: bool) -> None:
    cz.DistributedLoss(DrawingOnRank1(of_all=of_all, reduction="none"))(z(), torch.arange(4) % 2)


def same_on_rank_0() -> None:
    rows = z()
    cz.DistributedLoss(lambda a, b: (a @ b.T).sum())(rows, rows.clone() if rank() else rows)


GATHERED = "NTXent: every rank brought the very same embeddings"
TWICE = "CrossBatchMemory: a backward pass computes the loss again, as torch.utils.checkpoint does"
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "gathered before": (lambda: cz.DistributedLoss(cz.NTXent())(SAME, SAME + 1), GATHERED),
    "gathered before, after a validation": (after_a_validation, GATHERED),
    "anchors of a loss that draws": (lambda: drawing(of_all=True), "reduction='none'"),
    "anchors of a loss that draws on rank 1": (lambda: drawing(of_all=False), "reduction='none'"),
    "a memory in a checkpoint": (lambda: in_a_checkpoint(reentrant=False), TWICE),
    "a memory in a reentrant checkpoint": (lambda: in_a_checkpoint(reentrant=True), TWICE),
    "one tensor on some rank only": (same_on_rank_0, "ranks disagree on which arguments are one tensor"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_every_rank_refuses_alike(what: str, worlds: Worlds) -> None:
    bad, words = REFUSED[what]
    text, _ = common_error(worlds, 2, bad, lambda: cz.DistributedLoss(cz.NTXent())(z(), z(seed=1)).item())
    assert words in text


def test_equal_embeddings_that_prove_nothing(worlds: Worlds) -> None:
    def coincidence() -> None:
        cz.DistributedLoss(cz.NTXent(), check_distinct=False)(SAME, SAME)
        cz.DistributedLoss(cz.NTXent())(SAME[:1], SAME[:1])  # one embedding, and embeddings all alike
        cz.DistributedLoss(cz.NTXent())(SAME[:1].repeat(3, 1), SAME[:1].repeat(3, 1))

    worlds.run(2, coincidence)


def test_a_world_for_a_process_group_keeps_the_options(worlds: Worlds) -> None:
    def job() -> tuple[str | None, bool]:
        bad = z().detach()
        bad[0] = torch.nan
        loss = cz.DistributedLoss(cz.InfoNCE(), process_group=World.of(), check_finite=False, check_distinct=False)
        return error_message(lambda: loss(bad, z(seed=1))), bool(loss(bad, z(seed=1)).isnan())

    assert worlds.run(2, job) == [(None, True)] * 2


@pytest.mark.parametrize("group", [1, "dp", object])
def test_what_names_no_processes(group: Any) -> None:
    with pytest.raises(ValueError, match="process_group: a process group, a 1-d DeviceMesh, a World or None"):
        World.of(group)


def test_subgroups_do_not_share_what_they_reserve(worlds: Worlds) -> None:
    """Nor does a memory that fills change the shapes of a step."""

    def job() -> list[Tensor]:
        with groups((0, 1), (2,)) as own:
            memory = cz.CrossBatchMemory(cz.InfoNCE(), 20, D, dtype=torch.float64)
            whole = cz.DistributedLoss(memory)
            part = cz.DistributedLoss(cz.NTXent(), process_group=own)
            found = []
            for step in range(4):
                found += [whole(z(3, step), z(3, step + 50)).detach(), part(z(2, step), z(2, step + 50)).detach()]
        return found

    zero, one, _ = worlds.run(3, job)
    for a, b in zip(zero, one, strict=True):
        close(a, b)
