"""A ring: refusals and precision; tests/test_contract.py has its results, tests/test_explain.py what it sends."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import drawn, error_message, local_shard, numbers
from tests.losses import zoo_softmax
from tests.random_steps.rank import limits
from tests.random_steps.test_random_steps import SHARED
from tests.zoo import ZOO, Entry


def errors_of_rows() -> list[str | None]:
    z, ids = torch.eye(2) + dist.get_rank(), torch.arange(2)
    sup_con, mnrl = (cz.DistributedLoss(loss, ring=True) for loss in (cz.SupCon(), cz.MNRL()))
    differing = cz.DistributedLoss(cz.SigLIP(), ring=dist.get_rank() == 0)
    with limits(SHARED):
        return [
            error_message(lambda: sup_con(z, mask=torch.ones(2, 4))),
            error_message(lambda: mnrl(z, z, document_ids=ids)),
            error_message(lambda: differing(z, z)),
        ]


def test_arguments_that_need_all_candidates_are_refused_on_every_rank(worlds: Worlds) -> None:
    one, other = worlds.run(2, errors_of_rows)
    assert one == other
    for message, words in zip(one, ("SupCon: with ring=True", "MNRL: with ring=True", "ring"), strict=True):
        assert message is not None
        assert words in message


SHARDS = (14, 10)


def batch(entry: Entry, dtype: torch.dtype) -> list[Tensor]:
    labels = torch.arange(sum(SHARDS)) % 6
    centres = numbers(sum(SHARDS), 16, seed=1)[labels]
    rows = [(centres + 0.7 * numbers(sum(SHARDS), 16, seed=2 + view)).to(dtype) for view in range(entry.views)]
    return rows if entry.call == "views" else [rows[0], labels]


def gradients(loss: Callable[..., Tensor], rows: Sequence[Tensor]) -> Tensor:
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in rows]
    return torch.cat(torch.autograd.grad(loss(*leaves), [x for x in leaves if x.requires_grad]), 1).double()


SHORT = ["NTXent", "NTXent, three views", "SupCon", "Clip", "SigLIP"]


@pytest.mark.parametrize(
    ("name", "dtype", "ring"), drawn(SHORT, [torch.bfloat16, torch.float16], [True, False], one_in=2), ids=str
)
def test_16_bit_rows_are_summed_in_32(name: str, dtype: torch.dtype, ring: bool, worlds: Worlds) -> None:
    """tests/test_explain.py counts the bytes that a ring sends of them."""
    entry = next(x for x in (*ZOO, *zoo_softmax.ENTRIES) if x.name == name)

    def job() -> Tensor:
        loss = cz.DistributedLoss(entry.make(temperature=0.1), grad_reduction="sum", ring=ring)
        with limits(SHARED), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return gradients(loss, [local_shard(x, SHARDS) for x in batch(entry, dtype)])

    rows, dense = batch(entry, dtype), functools.partial(entry.dense, temperature=0.1)
    exact = gradients(dense, [x.double() if x.is_floating_point() else x for x in rows])
    errors = [(x - exact).norm() / exact.norm() for x in (torch.cat(worlds.run(2, job)), gradients(dense, rows))]
    assert not errors[0] > errors[1], errors  # float16 overflows in some formulas: NaN
    assert errors[0] <= 2 * torch.finfo(dtype).eps
