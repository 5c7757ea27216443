"""A call that raises moves nothing: the state of a loss stays what it was, bit by bit, on every rank."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.loss_base.loss import Inputs, Loss
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import drawn, error_message
from tests.own_losses import OF_CATALOGUE, OwnLoss
from tests.zoo import BatchHard
from tools.vectors.cases import LABELLED, VIEWS, WIDTH


def memory(loss: Callable[[], Any]) -> Callable[[], Loss]:
    return lambda: cz.CrossBatchMemory(loss(), 20, WIDTH, dtype=torch.float64)


class References(nn.Module):
    def forward(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: Any, ref_emb: Tensor, ref_labels: Tensor
    ) -> Tensor:
        return (embeddings.sum(0) - ref_emb.sum(0)).square().sum()


class Negatives(nn.Module):
    def forward(self, queries: Tensor, keys: Tensor, negatives: Tensor) -> Tensor:
        return (queries.sum(0) + keys.sum(0)).square().sum() + negatives.sum()


INNER = {
    f"memory of {kind.__name__}": OwnLoss(memory(kind), kinds)
    for kind, kinds in [(BatchHard, LABELLED), (References, LABELLED), (Negatives, VIEWS)]
}
"""Memories of losses that fail inside."""

STATEFUL = {name: OF_CATALOGUE[name] for name in ("dino", "tico", "sigreg", "lejepa", "nnclr")} | {
    "memory of InfoNCE": OwnLoss(memory(cz.InfoNCE), VIEWS),
    "memory of SupCon": OwnLoss(memory(cz.SupCon), LABELLED),
    **INNER,
}


def refused(loss: Loss, arguments: dict[str, Tensor]) -> None:
    first = next(iter(arguments.values())).detach().clone()
    first[0, 0] = torch.nan if dist.get_rank() == dist.get_world_size() - 1 else 0.0
    cz.DistributedLoss(loss, check_distinct=False)(first, *list(arguments.values())[1:])


class Raising(Loss):
    def inputs(self, *rows: Tensor) -> Inputs:
        return Inputs({f"argument {i}": x for i, x in enumerate(rows)})

    def compute(self, batch: Batch) -> Tensor:
        raise RuntimeError("the term failed")


def raises(*_: Any, **named: Any) -> Tensor:
    raise RuntimeError("the user's loss failed.")


def failing(loss: Any) -> Any:
    return patch.object(type(loss.loss), "rows" if isinstance(loss.loss, cz.RowLoss) else "forward", raises)


def fails_inside(loss: Any, arguments: dict[str, Tensor]) -> None:
    with failing(loss):
        cz.DistributedLoss(loss, check_distinct=False)(*arguments.values())


def moved_first(loss: Any) -> None:
    """Let the state move before the batch is checked."""

    def inputs(self: Any, *rows: Tensor) -> Inputs:
        for buffer in self.buffers():
            buffer.add_(1)
        stated: Inputs = super(type(self), self).inputs(*rows)
        return stated

    loss.__class__ = type(type(loss).__name__, (type(loss),), {"inputs": inputs})


class Failure(NamedTuple):
    """A call that fails, and the mistake that would let it move the state: of the loss, or a context that is missing."""

    call: Callable[[Any, dict[str, Tensor]], Any]
    losses: dict[str, OwnLoss]
    damage: Callable[[Any], None] = lambda loss: None
    without: Sequence[str] = ()


FAILURES = {
    "a refused batch": Failure(refused, STATEFUL, damage=moved_first),
    "a failed inner loss": Failure(
        fails_inside, INNER, without=["contrastive_zoo.losses.cross_batch_memory.state_kept_on_error"]
    ),
    "a failed term": Failure(
        lambda loss, of: cz.DistributedLoss(cz.WeightedSum([loss, Raising()]), check_distinct=False)(*of.values()),
        STATEFUL,
        without=["contrastive_zoo.losses.compositions.state_kept_on_error"],
    ),
}


def moved(failure: str, name: str, *, split: bool, mutant: bool = False) -> list[str]:
    """On every rank: the buffers that a call which fails has moved, after one that did not fail."""
    torch.manual_seed(0)
    how, case = FAILURES[failure], FAILURES[failure].losses[name]
    loss = case.make().double()
    first, second = (case.arguments(dist.get_rank(), dist.get_world_size(), draw) for draw in (0, 1))
    with splitting(always=split), ExitStack() as stack:
        cz.DistributedLoss(loss, check_distinct=False)(*first.values())
        before = {name: x.clone() for name, x in loss.named_buffers()}
        if mutant:
            how.damage(loss)
            for context in how.without:
                stack.enter_context(patch(context, nullcontext))
        with pytest.raises((ValueError, RuntimeError)):
            how.call(loss, second)  # of the same batch a moving average would stay where it is
    return [name for name, x in loss.named_buffers() if not torch.equal(x, before[name])]


CASES = [(failure, name) for failure, of in FAILURES.items() for name in of.losses]


@pytest.mark.parametrize(("case", "world_size"), drawn(CASES, [2, 1], one_in=2), ids=str)
def test_a_call_that_fails_moves_nothing(case: tuple[str, str], world_size: int, worlds: Worlds) -> None:
    failure, name = case
    split = CASES.index(case) // 2 % 2 == 0 or failure == "a failed inner loss"
    assert worlds.run(world_size, moved, failure, name, split=split) == [[]] * world_size
    if name in ("dino", "nnclr", "memory of SupCon", "memory of References"):
        assert any(worlds.run(2, moved, failure, name, split=True, mutant=True))


@pytest.mark.parametrize("split", [False, True])
def test_a_loss_that_fails_on_one_rank_fails_on_all(split: bool, worlds: Worlds) -> None:
    """The memory of no rank moves, also not that of the rank whose loss has a value; and the next call is as any other."""

    def job() -> list[Any]:
        torch.manual_seed(0)
        loss = memory(References)()
        loss_fn: Any = cz.DistributedLoss(loss).double()
        arguments = OwnLoss(lambda: loss, LABELLED).arguments(dist.get_rank(), 2).values()
        found: list[Any] = []
        with splitting(always=split):
            for fails in (False, dist.get_rank() == 1, False):
                with failing(loss) if fails else nullcontext():
                    found.append(error_message(lambda: loss_fn(*arguments)) or len(loss.memory))
        return found

    text = "CrossBatchMemory: rank 1: RuntimeError: the user's loss failed."
    assert worlds.run(2, job) == [[8, text, 16]] * 2


def test_a_replaced_buffer_comes_back() -> None:
    """A third-party module may assign a buffer instead of writing into it."""
    norm = nn.BatchNorm1d(1)
    kept = norm.running_mean

    class Assigns(cz.RowLoss):
        def __post_init__(self) -> None:
            self.norm = norm

        def rows(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
            self.norm.running_mean = torch.ones(1)
            return raises(), positive.any(1)

    with pytest.raises(RuntimeError, match="the user's loss failed"):
        cz.WeightedSum([Assigns()])(torch.eye(WIDTH), torch.arange(WIDTH) % 2)
    assert norm.running_mean is kept


def test_a_monitor_refuses_before_the_loss_moves(worlds: Worlds) -> None:
    def job() -> tuple[str | None, list[Tensor], str]:
        calls: list[Tensor] = []
        loss_fn = cz.DistributedLoss(lambda scores: calls.append(scores) or scores.sum(), check_distinct=False)
        monitor = cz.Monitor(loss_fn)
        return error_message(lambda: loss_fn(torch.ones(3))), calls, monitor.compared()

    for text, *state in worlds.run(2, job):
        assert "holds embeddings" in str(text)
        assert state == [[], "Monitor(every=50), call 0"]
