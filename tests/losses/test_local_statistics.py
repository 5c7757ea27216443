"""A loss that takes a statistic of its own rank, where that of all ranks belongs, is caught by the contract."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from contrastive_zoo.engine import statistics
from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.losses import random_slices, sparse
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.invariants import CONTRACT, Broken, same_state
from contrastive_zoo.testing.measurement import Trial
from tests.helpers import Pools, numbers, rank
from tests.losses.whole_zoo import WHOLE_ZOO
from tests.losses.zoo_statistics import WIDTH


def mean_of_rank_means(batch: Batch, names: list[str]) -> Tensor:
    rows = torch.cat([batch.rows[name].flatten(0, -2) for name in names])
    return rows.abs().mean(0) / len(batch.samples.sizes)


def without_sums_of(numbers: int) -> Callable[..., Tensor]:
    """Return a sum over ranks that leaves tensors of so many numbers as they are."""
    whole = Batch.sum
    return lambda self, x, *, gradient: x if x.numel() == numbers else whole(self, x, gradient=gradient)


def draws_of_rank(step: Tensor, *shape: int) -> Tensor:
    return numbers(*shape, seed=rank(), dtype=torch.float32)


MUTANTS: dict[str, tuple[str, Any, str, Callable[..., Any]]] = {
    "groups of the own rank": ("KoLeo, groups", Batch, "indices", lambda batch: torch.arange(batch.samples.size)),
    "clusters balanced on the own rank": ("DINO, Sinkhorn", Batch, "log_sum_exp", lambda _, x, **of: x),
    "patches balanced on the own rank": ("IBOT, Sinkhorn", Batch, "log_sum_exp", lambda _, x, **of: x),
    "directions of the own rank": ("RDMReg", random_slices, "_drawn", draws_of_rank),
    "projections of the own rank's embeddings": ("VISReg, three views", statistics, "all_gather", lambda x, **_: x),
    "a mean of the own rank": ("VISReg, three views", random_slices, "centered", lambda _, x: x - x.mean(0)),
    "a centre of the own rank's views": ("DINO", Batch, "sum", without_sums_of(WIDTH + 1)),
    "a centre of the own rank's patches": ("IBOT", Batch, "sum", without_sums_of(WIDTH + 1)),
    "mean of rank means": ("FLOPS", sparse, "_part_of_mean", mean_of_rank_means),
    "norms of the own rank": ("AdaFace", Batch, "sum", without_sums_of(3)),
    "cosines of the own rank": ("CurricularFace", Batch, "sum", without_sums_of(1)),
}
"""The row of the zoo, and what takes whose place."""


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_local_statistic_is_caught(mutant: str, monkeypatch: pytest.MonkeyPatch, pools: Pools) -> None:
    name, *planted = MUTANTS[mutant]
    case = next(x for x in WHOLE_ZOO if x.name == name).case()
    for is_planted, shards in itertools.product((False, True), ((2, 4), (1, 3, 2))):
        if is_planted:
            monkeypatch.setattr(*planted)
        trial = Trial(case, GlobalBatch(shards, d=3, seed=1), pools.threads)
        with splitting(always=True), pytest.raises(Broken) if is_planted else nullcontext():
            for invariant in (*CONTRACT, same_state):
                invariant(trial)
