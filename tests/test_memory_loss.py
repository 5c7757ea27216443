"""NNCLR and ReSSL on an accelerator, where the host does not know how many slots of their memory are filled."""

import copy
from typing import Any

import pytest
import torch

import contrastive_zoo as cz
from contrastive_zoo.losses import memory_loss
from tests.helpers import numbers
from tests.simulated import device, on_cpu, put_by, value_and_gradients

D = 3
LOSSES = {"NNCLR": (lambda: cz.NNCLR(7, D), 4), "ReSSL": (lambda: cz.ReSSL(7, D, temperature=0.5), 2)}
"""How each is made, and how many arguments it takes."""


def of_three_calls(name: str, *, on_device: bool) -> list[Any]:
    """Return values, gradients and memories, while the memory is empty, filled in part, and full."""
    make, count = LOSSES[name]
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
