"""A loss without DistributedLoss, on one of several processes: it is local, and warns unless embeddings were gathered."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import contrastive_zoo as cz
from contrastive_zoo.ranks import suggestions
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import assert_says, close, numbers
from tests.test_one_process import Gather, with_dist_nn, with_functional_collectives


def z(n: int = 4, of_rank: int | None = None) -> Tensor:
    seed = dist.get_rank() if of_rank is None else of_rank
    return numbers(n, 3, seed=seed).requires_grad_()


def y(n: int) -> Tensor:
    return torch.arange(n) % 2


class HoldsALoss(nn.Module):
    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, view1: Tensor, view2: Tensor) -> Tensor:
        return self.loss(view1, view2)


def test_a_bare_loss_among_several_processes_warns_once_and_is_local(worlds: Worlds) -> None:
    def job() -> tuple[list[tuple[str, str]], list[Tensor]]:
        rows, whole = z(4 + dist.get_rank()), torch.cat([z(4, 0), z(5, 1)]).detach()
        suggestions.ASKED.add("local negatives")
        expected = cz.NTXent()(whole, whole)
        suggestions.ASKED.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            holder = HoldsALoss(cz.NTXent())
            before = [{*vars(x)} for x in holder.modules()]
            for wrapped in (holder.loss, holder, lambda view1, view2: holder(view1, view2)):
                close(cz.DistributedLoss(wrapped)(rows, rows).detach(), expected)
            assert not caught
            assert before == [{*vars(x)} for x in holder.modules()]
            found = [cz.NTXent()(rows, rows), cz.NTXent()(rows, rows), cz.SupCon()(rows, y(len(rows)))]
        assert {x.category for x in caught} == {UserWarning}
        return [(str(x.message), x.filename) for x in caught], found

    for rank, (texts, found) in enumerate(worlds.run(2, job)):
        rows = z(4 + rank, of_rank=rank)
        expected = [cz.NTXent()(rows, rows)] * 2 + [cz.SupCon()(rows, y(len(rows)))]
        for value, alone in zip(found, expected, strict=True):
            close(value, alone.detach())
        ((text, where),) = texts
        assert_says(text, "this process's own rows only, though 2 processes run … DistributedLoss(NTXent(...))")
        assert where == __file__, "the warning points at the user's line"


GATHERS: list[tuple[Callable[[Tensor], Tensor], int]] = [
    (with_dist_nn, 0),
    (with_functional_collectives, 0),
    (lambda x: cz.collectives.all_gather(x), 0),
    (Gather.apply, 0),
    (lambda x: Gather.apply(x.detach()), 1),
    (lambda x: x.gather(0, torch.zeros_like(x, dtype=torch.int64)), 1),  # torch's own
]
"""How embeddings are gathered, and how many warnings follow."""


def warnings_of(gather: Callable[[Tensor], Tensor]) -> int:
    suggestions.ASKED.clear()
    rows = gather(z().tanh()).chunk(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cz.NTXent()(*rows)
    return len(caught)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("gather", "count"), GATHERS)
def test_gathered_embeddings_cause_no_warning(gather: Callable[[Tensor], Tensor], count: int, worlds: Worlds) -> None:
    assert worlds.run(2, warnings_of, gather) == [count] * 2
