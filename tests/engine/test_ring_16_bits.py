"""A ring sends embeddings of 16 bits in 16 bits, and sums in 32: the gradient is better than the plain formula's."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import contrastive_zoo as cz
from contrastive_zoo.engine import exchange
from contrastive_zoo.testing.worlds import Worlds
from tests.engine.test_ring import GENERAL_PATH
from tests.helpers import EVERY_CASE, local_shard, numbers
from tests.losses import zoo_margins, zoo_softmax
from tests.stateful_rank import limits
from tests.zoo import ZOO, Entry

NAMES = {
    "NTXent", "SupCon", "SigLIP", "SupSigmoid",
}  # fmt: skip
"""Losses of every engine, of one tower and of two, of one set of embeddings and of concatenated views."""
ENTRIES = [x for x in (*ZOO, *zoo_softmax.ENTRIES, *zoo_margins.ENTRIES) if x.name in NAMES]
SHARDS = (14, 10)


def test_all_are_there() -> None:
    assert {x.name for x in ENTRIES} == NAMES


def batch(entry: Entry, dtype: torch.dtype) -> list[Tensor]:
    """Return the arguments of one process: embeddings around centres, so that positives are similar."""
    labels = torch.arange(sum(SHARDS)) % 6
    centres = numbers(sum(SHARDS), 16, seed=1)[labels]
    rows = [(centres + 0.7 * numbers(sum(SHARDS), 16, seed=2 + view)).to(dtype) for view in range(entry.views)]
    return rows if entry.call == "views" else [rows[0], labels]


def gradients(loss: Callable[..., Tensor], rows: Sequence[Tensor]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in rows]
    return list(torch.autograd.grad(loss(*leaves), [x for x in leaves if x.requires_grad]))


def in_ring(index: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], set[torch.dtype]]:
    """Return the gradients with a ring and without, and the dtypes of its messages, on a rank."""
    entry, dtypes = ENTRIES[index], set()

    class Seen(exchange.SendReceive):
        def __init__(self, rows: Tensor, *rest: Any) -> None:
            dtypes.add(rows.dtype)
            super().__init__(rows, *rest)

    mine = [local_shard(x, SHARDS) for x in batch(entry, dtype)]
    found = []
    with limits(GENERAL_PATH), patch.object(exchange, "SendReceive", Seen), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for option in (True, False):
            loss = cz.DistributedLoss(entry.make(temperature=0.1), grad_reduction="sum", ring=option)
            found.append(gradients(loss, mine))
    return found[0], found[1], dtypes


def drawn(dtype: torch.dtype) -> list[int]:
    """Return the places of the entries that are tested with a dtype: all in a search, otherwise half."""
    return list(range(len(ENTRIES)) if EVERY_CASE else range(dtype == torch.float16, len(ENTRIES), 2))


def every(places: list[int], dtype: torch.dtype) -> list[Any]:
    return [in_ring(index, dtype) for index in places]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_rows_are_sent_in_16_bits_and_summed_in_32(dtype: torch.dtype, worlds: Worlds) -> None:
    places = drawn(dtype)
    for index, of_ranks in zip(places, zip(*worlds.run(2, every, places, dtype), strict=True), strict=True):
        entry = ENTRIES[index]
        dense = functools.partial(entry.dense, temperature=0.1)
        rows = batch(entry, dtype)
        exact, plain = gradients(dense, [_as(x, torch.float64) for x in rows]), gradients(dense, rows)
        with_ring, without = ([torch.cat(x) for x in zip(*(of[i] for of in of_ranks), strict=True)] for i in range(2))
        errors = [error(x, exact) for x in (with_ring, without, plain)]
        assert not errors[0] > errors[2], (entry.name, errors)  # float16 overflows in some formulas: NaN
        assert errors[0] <= errors[1] + torch.finfo(dtype).eps / 2, (entry.name, errors)
        assert all(dtypes - {torch.int64} == {dtype, torch.float32} for *_, dtypes in of_ranks), entry.name


def error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    return max(float((x.double() - y).norm() / y.norm()) for x, y in zip(found, exact, strict=True))


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x
