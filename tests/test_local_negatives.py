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
from tests.helpers import close, numbers
from tests.test_one_process import Gather, with_dist_nn, with_functional_collectives


def z(n: int = 4, of_rank: int | None = None) -> Tensor:
    seed = dist.get_rank() if of_rank is None else of_rank
    return numbers(n, 3, seed=seed).requires_grad_()


def y(n: int) -> Tensor:
    return torch.arange(n) % 2


class HoldsALoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loss = cz.NTXent()

    def forward(self, view1: Tensor, view2: Tensor) -> Tensor:
        return self.loss(view1, view2)


WRAPPED = cz.NTXent, HoldsALoss, lambda: lambda view1, view2: cz.NTXent()(view1, view2)
"""Losses of all embeddings in a wrapper, also if they are called by code of the user's."""


def test_a_bare_loss_among_several_processes_warns_once_and_is_local(worlds: Worlds) -> None:
    def job() -> tuple[list[tuple[str, str]], list[Tensor]]:
        rows, whole = z(4 + dist.get_rank()), torch.cat([z(4, 0), z(5, 1)]).detach()
        suggestions.ASKED.add("local negatives")
        expected = cz.NTXent()(whole, whole)
        suggestions.ASKED.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for make in WRAPPED:
                loss = make()
                before = [{*vars(x)} for x in loss.modules()] if isinstance(loss, nn.Module) else []
                close(cz.DistributedLoss(loss)(rows, rows).detach(), expected)
                assert before == ([{*vars(x)} for x in loss.modules()] if isinstance(loss, nn.Module) else [])
            assert not caught
            found = [cz.NTXent()(rows, rows), cz.NTXent()(rows, rows), cz.SupCon()(rows, y(len(rows)))]
        assert {x.category for x in caught} == {UserWarning}
        return [(str(x.message), x.filename) for x in caught], found

    for rank, (texts, found) in enumerate(worlds.run(2, job)):
        rows = z(4 + rank, of_rank=rank)
        expected = [cz.NTXent()(rows, rows)] * 2 + [cz.SupCon()(rows, y(len(rows)))]
        for value, alone in zip(found, expected, strict=True):
            close(value, alone.detach())
        ((text, where),) = texts
        assert "this process's own rows only, though 2 processes run" in text
        assert "DistributedLoss(NTXent(...))" in text
        assert where == __file__, "the warning points at the user's line"


GATHERS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "torch.distributed.nn": (with_dist_nn, 0),
    "functional collectives": (with_functional_collectives, 0),
    "cz.collectives.all_gather": (lambda x: cz.collectives.all_gather(x), 0),
    "by hand": (Gather.apply, 0),
    "by hand, without gradient": (lambda x: Gather.apply(x.detach()), 1),
    "torch.gather": (lambda x: x.gather(0, torch.zeros_like(x, dtype=torch.int64)), 1),
}
"""How embeddings are gathered, and how many warnings follow."""


def warnings_of(gather: Callable[[Tensor], Tensor]) -> int:
    suggestions.ASKED.clear()
    rows = gather(z().tanh()).chunk(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cz.NTXent()(*rows)
    return len(caught)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", GATHERS)
def test_gathered_embeddings_cause_no_warning(name: str, worlds: Worlds) -> None:
    gather, count = GATHERS[name]
    assert worlds.run(2, warnings_of, gather) == [count] * 2
