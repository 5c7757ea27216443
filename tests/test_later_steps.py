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


def rank() -> int:
    return dist.get_rank()


def z(n: int = 4, seed: int = 0) -> Tensor:
    """Other embeddings on each rank."""
    return numbers(n, D, seed=100 * seed + rank()).requires_grad_()


def y(n: int = 4) -> Tensor:
    return torch.arange(n) % 2


def labelled(step: int, total: int) -> tuple[Tensor, Tensor]:
    return numbers(total, D, seed=10 * step + 1), torch.arange(total) % 3


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


# ---------------------------------------------------------------------------------------------- what ranks disagree on


def good() -> float:
    return cz.DistributedLoss(cz.NTXent())(z(), z(seed=1)).item()


class Drawing(cz.RowLoss):
    """A user's loss that draws."""

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        return (similarity * torch.rand_like(similarity) * negative).sum(1), negative.any(1)


class DrawingOnRank1(cz.RowLoss):
    """Its candidates need random numbers on one rank only."""

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        if rank() == 1:
            torch.rand(())
        return (similarity * negative).sum(1), negative.any(1)


def test_embeddings_that_were_gathered_before(worlds: Worlds) -> None:
    def gathered() -> None:
        cz.DistributedLoss(cz.NTXent())(numbers(4, D, seed=1), numbers(4, D, seed=2))

    text, _ = common_error(worlds, 2, gathered, good)
    assert "NTXent: every rank brought the very same embeddings" in text

    def after_a_validation() -> None:
        loss_fn = cz.DistributedLoss(cz.NTXent())
        with torch.no_grad():
            loss_fn(z(), z(seed=5))
        loss_fn(numbers(4, D, seed=1), numbers(4, D, seed=2))

    text, _ = common_error(worlds, 2, after_a_validation, good)
    assert "NTXent: every rank brought the very same embeddings" in text

    def coincidence() -> None:
        same = numbers(4, D, seed=1)
        cz.DistributedLoss(cz.NTXent(), check_distinct=False)(same, same)
        cz.DistributedLoss(cz.NTXent())(same[:1], same[:1])  # one embedding, and embeddings all alike, prove nothing
        cz.DistributedLoss(cz.NTXent())(same[:1].repeat(3, 1), same[:1].repeat(3, 1))

    worlds.run(2, coincidence)


# --------------------------------------------------------------------------------------- losses that draw, or remember


@pytest.mark.parametrize("make", [Drawing, DrawingOnRank1])
def test_anchors_of_a_loss_that_draws_cannot_be_told_apart(make: Callable[[], cz.RowLoss], worlds: Worlds) -> None:
    def bad() -> None:
        loss = make()
        loss.reduction = "none"
        cz.DistributedLoss(loss)(z(), y())

    text, _ = common_error(worlds, 2, bad, good)
    assert "reduction='none'" in text


# ------------------------------------------------------------------------------------------------- activation checkpoints


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_memory_is_not_filled_twice_by_a_checkpoint(reentrant: bool, worlds: Worlds) -> None:
    def bad() -> None:
        loss = cz.DistributedLoss(cz.CrossBatchMemory(cz.InfoNCE(), 8, D))
        checkpoint(loss, z().float(), z(seed=1).float(), use_reentrant=reentrant).backward()

    text, _ = common_error(worlds, 2, bad, good)
    assert "CrossBatchMemory: a backward pass computes the loss again, as torch.utils.checkpoint does" in text


# ----------------------------------------------------------------------------------------------------------- small things


def test_static_shapes_with_a_memory_that_fills(worlds: Worlds) -> None:
    def job() -> list[Tensor]:
        loss = cz.DistributedLoss(cz.CrossBatchMemory(cz.InfoNCE(), 20, D), static_shapes=True)
        return [loss(z(seed=step).float(), z(seed=9 + step).float()).detach() for step in range(4)]

    first, second = worlds.run(2, job)
    for a, b in zip(first, second, strict=True):
        close(a, b)


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


def test_arguments_that_are_one_tensor_on_some_rank_only(worlds: Worlds) -> None:
    def bad() -> None:
        rows = z()
        cz.DistributedLoss(lambda a, b: (a @ b.T).sum())(rows, rows.clone() if rank() else rows)

    text, _ = common_error(worlds, 2, bad, good)
    assert "ranks disagree on which arguments are one tensor" in text


def test_subgroups_do_not_share_what_they_reserve(worlds: Worlds) -> None:
    def job() -> list[Tensor]:
        with groups((0, 1), (2,)) as own:
            whole, part = cz.DistributedLoss(cz.NTXent()), cz.DistributedLoss(cz.NTXent(), process_group=own)
            found = []
            for step in range(4):
                found += [whole(z(3, step), z(3, step + 50)).detach(), part(z(2, step), z(2, step + 50)).detach()]
        return found

    zero, one, _ = worlds.run(3, job)
    for a, b in zip(zero, one, strict=True):
        close(a, b)
