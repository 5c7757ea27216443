"""A loss that takes a statistic of its own rank, where that of all ranks belongs, is caught by the contract."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from contrastive_zoo.engine.batch import Batch
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.interventions import splitting
from contrastive_zoo.testing.invariants import CONTRACT, Broken
from contrastive_zoo.testing.measurement import Trial
from tests.helpers import Pools
from tests.losses.whole_zoo import WHOLE_ZOO


def from_zero(batch: Batch) -> Tensor:
    return torch.arange(batch.samples.size)


MUTANTS: dict[str, tuple[str, Any, str, Callable[..., Any]]] = {
    "groups of the own rank": ("KoLeo, groups", Batch, "indices", from_zero),
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
            for invariant in CONTRACT:
                invariant(trial)
