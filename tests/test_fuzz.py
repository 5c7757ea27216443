"""Nonsense as arguments of every public callable: a result or an error in words, never an internal error."""

import os

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import contrastive_zoo as cz
from tests import fuzzing

EXAMPLES = {} if os.environ.get("HYPOTHESIS_PROFILE") == "long" else {"max_examples": 4, "derandomize": True}


def test_every_loss_is_called() -> None:
    classes = {name: x for name in cz.__all__ if isinstance(x := getattr(cz, name), type)}
    losses = {name for name, x in classes.items() if issubclass(x, cz.RowLoss)}
    assert losses - {"RowLoss"} <= fuzzing.TARGETS.keys()


@pytest.mark.parametrize("name", sorted(fuzzing.TARGETS))
def test_the_arguments_before_nonsense_are_valid(name: str) -> None:
    target = fuzzing.TARGETS[name]()
    target.run(**fuzzing.base(target))


@pytest.mark.parametrize("name", sorted(fuzzing.TARGETS))
@settings(**EXAMPLES, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck), deadline=None)
@given(st.data())
def test_nonsense_is_answered_in_words(name: str, data: st.DataObject) -> None:
    target = fuzzing.TARGETS[name]()
    assert fuzzing.internal_error(target, data.draw(fuzzing.calls(target))) is None


def test_an_internal_error_is_noticed() -> None:
    target = fuzzing.Target(lambda x: cz.World.of(cz.World()).shards(x), {"x": 1}, {})
    assert (fuzzing.internal_error(target, {"x": object()}) or "").startswith("TypeError at ranks/world.py")


def test_a_silent_broadcast_is_noticed() -> None:
    target = fuzzing.Target(lambda rows, labels: rows + labels[:, None], {}, {"rows": "n d", "labels": "n"})
    found = fuzzing.internal_error(target, {"rows": torch.ones(4, 3), "labels": torch.ones(1)})
    assert found is not None
    assert found.startswith("silent broadcast")
