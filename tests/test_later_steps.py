"""What a training meets after its first step: other sizes, settings that change, compositions, checkpoints, single rows."""

import copy
import pickle
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import contrastive_zoo as cz
from contrastive_zoo.ranks.world import World
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import close, common_error, error_message, groups, learnt, local_shard, numbers

D = 3


def rank() -> int:
    return dist.get_rank()


def z(n: int = 4, seed: int = 0) -> Tensor:
    """Other rows on each rank."""
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
    """A user's loss that draws, and remembers what it has seen."""

    def __init__(self, draws: bool = True, counts: bool = True) -> None:
        super().__init__()
        self.draws, self.counts = draws, counts
        self.register_buffer("seen", torch.zeros(()))

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        noise = torch.rand_like(similarity) if self.draws else torch.ones_like(similarity)
        if self.counts:
            self.seen.add_(similarity.detach().sum())
        return (similarity * noise * negative).sum(1) * (1 + self.seen.detach()), negative.any(1)


class DrawingOnRank1(Drawing):
    """Its candidates need random numbers on one rank only."""

    def __init__(self) -> None:
        super().__init__(draws=False, counts=False)

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        if rank() == 1:
            torch.rand(())
        return super().rows(similarity, positive, negative)


class MyMargin(cz.RowLoss):
    def __init__(self, margin: float) -> None:
        super().__init__()
        self.margin = margin

    def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        return ((similarity + self.margin) * negative).sum(1), negative.any(1)


Change = Callable[[cz.DistributedLoss, list[Any], ExitStack], Any]
"""What one rank does before a call: of its wrapper, of its arguments, and of what surrounds the call."""


def attribute(path: str, value: Any) -> Change:
    owner, _, name = path.rpartition(".")
    return lambda wrapped, args, stack: setattr(wrapped.get_submodule(owner), name, value)


def proxies() -> nn.Module:
    torch.manual_seed(rank() == dist.get_world_size() - 1)
    return cz.ProxyAnchor(4, D)


FROM_THE_FIRST_CALL: dict[str, tuple[Callable[[], Any], Change, str]] = {
    "class": (
        lambda: cz.Circle() if rank() == dist.get_world_size() - 1 else cz.Triplet(),
        lambda wrapped, args, stack: None,
        "ranks disagree on the loss: rank 0 has Triplet, rank {other} has Circle.",
    ),
    "proxies": (
        proxies,
        lambda wrapped, args, stack: None,
        "parameters, buffers or settings differ between ranks: weights has norm",
    ),
}
DISAGREEMENTS: dict[str, tuple[Callable[[], Any], Change, str]] = {
    "own setting": (
        lambda: MyMargin(0.1),
        attribute("loss.margin", 0.9),
        "ranks disagree on margin: rank 0 has 0.1, rank {other} has 0.9.",
    ),
    "nested setting": (
        lambda: cz.WeightedSum([cz.SupCon(), cz.Triplet(margin=0.1)]),
        attribute("loss.losses.1.margin", 0.9),
        "ranks disagree on losses.1.margin: rank 0 has 0.1, rank {other} has 0.9.",
    ),
    "argument": (
        cz.InfoNCE,
        lambda wrapped, args, stack: args.append(z(seed=9)),
        "ranks disagree on what they bring: rank {other} brought negatives, rank 0 brought none. "
        "Pass negatives on every rank or on none.",
    ),
    "memory": (
        lambda: cz.CrossBatchMemory(cz.InfoNCE(), 8, D),
        lambda wrapped, args, stack: wrapped.loss.eval(),
        "ranks disagree on the loss's training: rank 0 has True, rank {other} has False.",
    ),
    "dense": (
        cz.InfoNCE,
        lambda wrapped, args, stack: stack.enter_context(cz.engine.plain_formulas()),
        "ranks disagree on plain_formulas(): rank 0 has False, rank {other} has True.",
    ),
} | {
    path: (
        cz.InfoNCE,
        attribute(path, value),
        f"ranks disagree on {path.rpartition('.')[2]}: rank 0 has {before}, rank {{other}} has {value}.",
    )
    for path, before, value in (
        ("loss.reduction", "mean", "none"),
        ("loss.symmetric", False, True),
        ("ring", False, True),
        ("static_shapes", False, True),
        ("grad_reduction", "mean", "sum"),
    )
}


def disagreeing(name: str, at: int) -> None:
    """A training in which the last rank is set up, or called, in another way at call ``at``, counted from 0."""
    make, change, _ = (FROM_THE_FIRST_CALL | DISAGREEMENTS)[name]
    loss = make()
    wrapped = cz.DistributedLoss(loss)
    for call in range(at + 1):
        of_pairs = isinstance(loss, (cz.InfoNCE, cz.CrossBatchMemory))
        args: list[Any] = [z(seed=call), z(seed=50 + call) if of_pairs else y()]
        with ExitStack() as stack:
            if call == at and rank() == dist.get_world_size() - 1:
                change(wrapped, args, stack)
            wrapped(*args)


@pytest.mark.parametrize(
    ("name", "at", "world_size"),
    [(name, 0, 3) for name in FROM_THE_FIRST_CALL | DISAGREEMENTS] + [(name, 2, 2) for name in DISAGREEMENTS],
)
def test_a_disagreement_is_one_error_on_every_rank(name: str, at: int, world_size: int, worlds: Worlds) -> None:
    text, _ = common_error(worlds, world_size, partial(disagreeing, name, at), good)
    assert (FROM_THE_FIRST_CALL | DISAGREEMENTS)[name][2].format(other=world_size - 1) in text


def made_again(wrapper: cz.DistributedLoss) -> cz.DistributedLoss:
    return cz.DistributedLoss(wrapper.loss)


@pytest.mark.parametrize(
    "again",
    [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), made_again],
    ids=["copied", "pickled", "made again"],
)
def test_a_wrapper_that_one_rank_copied_in_mid_training(again: Callable[[Any], Any], worlds: Worlds) -> None:
    def job() -> list[Tensor]:
        wrapped = cz.DistributedLoss(cz.Clip(**learnt(0.3)))
        for step in range(3):
            wrapped(z(4, step), z(4, step + 50))
        if rank() == 1:
            wrapped = again(wrapped)
        return [wrapped(z(4, step), z(4, step + 50)).detach() for step in range(3, 6)]

    first, second = worlds.run(2, job)
    for a, b in zip(first, second, strict=True):
        close(a, b)


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
        cz.DistributedLoss(cz.NTXent())(same[:1], same[:1])  # one row, and rows all alike, prove nothing
        cz.DistributedLoss(cz.NTXent())(same[:1].repeat(3, 1), same[:1].repeat(3, 1))

    worlds.run(2, coincidence)


# --------------------------------------------------------------------------------------- losses that draw, or remember


@pytest.mark.parametrize(("draws", "counts"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    "shards", [[(3, 3)] * 4, [(4, 0), (1, 5), (900, 1200), (2, 3), (1200, 900)]], ids=["even", "uneven"]
)
def test_own_losses_that_draw_or_keep_a_state(draws: bool, counts: bool, shards: Any, worlds: Worlds) -> None:
    def job() -> list[tuple[Tensor, Tensor]]:
        torch.manual_seed(3 if rank() == 0 else 17)
        loss = Drawing(draws, counts).double()
        wrapped = cz.DistributedLoss(loss, check_distinct=False)
        found = []
        for step, sizes in enumerate(shards):
            args = (local_shard(x, sizes) for x in labelled(step, sum(sizes)))
            found.append((wrapped(*args).detach(), loss.seen.clone()))
        return found

    def alone() -> list[tuple[Tensor, Tensor]]:
        torch.manual_seed(3)
        loss, found = Drawing(draws, counts).double(), []
        for step, sizes in enumerate(shards):
            found.append((loss(*labelled(step, sum(sizes))).detach(), loss.seen.clone()))
        return found

    expected = worlds.run(1, alone)[0]
    for of_rank in worlds.run(2, job):
        for (value, seen), (one, one_seen) in zip(of_rank, expected, strict=True):
            close(value, one)
            close(seen, one_seen)


@pytest.mark.parametrize("make", [Drawing, DrawingOnRank1])
def test_anchors_of_a_loss_that_draws_cannot_be_told_apart(make: Callable[[], Drawing], worlds: Worlds) -> None:
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


# ------------------------------------------------------------------------------------------------------- single rows, views


@pytest.mark.parametrize(
    ("dtype", "d", "labels"), [(torch.float32, 128, torch.uint8), (torch.bfloat16, 6, torch.int64)]
)
@pytest.mark.parametrize("sizes", [(1, 1), (1, 0), (0, 1), (2, 1)])
def test_a_last_batch_of_one_row(dtype: torch.dtype, d: int, labels: torch.dtype, sizes: Any, worlds: Worlds) -> None:
    def third_party(embeddings: Tensor, classes: Tensor) -> Tensor:
        return (embeddings.float().sum(1) * (1 + classes.float())).sum()

    def job() -> list[Tensor]:
        found = []
        for loss in (cz.DistributedLoss(third_party), cz.DistributedLoss(cz.SupCon())):
            for n in (sizes, (3, 2), sizes):
                rows = numbers(sum(n), d, seed=1, dtype=torch.float32).to(dtype)
                classes = (torch.arange(sum(n)) % 2).to(labels)
                found.append(loss(local_shard(rows, n), local_shard(classes, n)).detach())
        return found

    first, second = worlds.run(2, job)
    for a, b in zip(first, second, strict=True):
        close(a, b)


def test_views_that_shift_between_ranks_are_refused_at_every_step(worlds: Worlds) -> None:
    """As many rows in all, so that gathered views would pair."""

    def bad() -> None:
        loss = cz.DistributedLoss(cz.WeightedSum([cz.NTXent(), cz.InfoNCE()]))
        loss(z(), z(seed=1))
        loss(z(3 + rank()), z(4 - rank(), seed=1))

    text, _ = common_error(worlds, 2, bad, good)
    assert "views must pair row by row" in text


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
