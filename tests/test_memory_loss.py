"""NNCLR and ReSSL: their memory is that of one process, and holds earlier calls; mistakes in either are caught."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import contrastive_zoo as cz
from contrastive_zoo.losses import memory_loss
from contrastive_zoo.testing.invariant import Broken
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import numbers
from tests.memory_invariants import MEMORY_INVARIANTS, MISTAKES, MemoryTrial
from tests.simulated import device, on_cpu, put_by, value_and_gradients

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


# ---------------------------------------------------------------------------------------------------- on an accelerator


def of_three_calls(name: str, *, on_device: bool) -> list[Any]:
    """Return values, gradients and memories, while the memory is empty, filled in part, and full."""
    make, count, _ = LOSSES[name]
    with device() as mode:
        put = put_by(mode) if on_device else copy.deepcopy
        loss = cz.DistributedLoss(put(make().double()))
        found = []
        for call in range(3):
            mode.reads.clear()
            sign = -1 if call else 1  # all that the second call compares is farther than an empty slot
            rows = [put(sign * numbers(5, D, seed=10 * call + i).abs()) for i in range(count)]
            results = value_and_gradients(loss, rows)
            assert not mode.reads
            found.append(on_cpu(results))
    return found


@pytest.mark.parametrize("name", LOSSES)
def test_an_accelerator_computes_the_same_without_reading_its_fill(name: str) -> None:
    found, expected = (of_three_calls(name, on_device=x) for x in (True, False))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_slots_that_are_not_filled_would_be_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: all slots count."""
    expected = of_three_calls(name, on_device=True)
    monkeypatch.setattr(memory_loss, "unfilled", lambda memory, filled: None)
    assert any(
        not torch.allclose(x, y) for x, y in zip(of_three_calls(name, on_device=True)[1], expected[1], strict=True)
    )
