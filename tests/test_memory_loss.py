"""NNCLR and ReSSL: their memory is that of one process, and holds earlier calls; mistakes in either are caught."""

from __future__ import annotations

from typing import Any

import pytest

import contrastive_zoo as cz
from contrastive_zoo.testing.invariant import Broken
from contrastive_zoo.testing.memory import MEMORY_INVARIANTS, MISTAKES, MemoryTrial
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import numbers

D = 3
LOSSES = {"NNCLR": (lambda: cz.NNCLR(7, D), 4, 0), "ReSSL": (lambda: cz.ReSSL(7, D, temperature=0.5), 2, 1)}
"""How each is made, how many arguments it takes, and which of them its memory holds."""
SPLITS = [(3, 2), (0, 5), (4, 1), (2, 3)]


def trial(name: str, worlds: Worlds, **mistake: Any) -> MemoryTrial:
    make, count, stored = LOSSES[name]
    calls = [[numbers(5, D, seed=10 * call + i) for i in range(count)] for call in range(len(SPLITS))]
    return MemoryTrial(lambda: cz.DistributedLoss(make()), calls, stored, SPLITS, worlds, **mistake)


@pytest.mark.parametrize("name", LOSSES)
def test_the_invariants_hold(name: str, worlds: Worlds) -> None:
    for invariant in MEMORY_INVARIANTS:
        assert invariant(trial(name, worlds))


@pytest.mark.parametrize("invariant", MEMORY_INVARIANTS, ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_each_invariant_catches_its_mistake(name: str, invariant: Any, worlds: Worlds) -> None:
    with pytest.raises(Broken):
        invariant(trial(name, worlds, damage=MISTAKES[invariant.catches]))
