"""The doctor says nothing of right losses, with their defaults, and names the mistake of wrong ones."""

from typing import Any

import pytest
import torch.nn.functional as F

from contrastive_zoo.testing import check
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.check import Report, examine
from contrastive_zoo.testing.invariants import same_value
from contrastive_zoo.testing.measurement import Case, Trial
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EVERY_CASE
from tests.testing.known_losses import RIGHT_LOSSES, WRONG_LOSSES, Known
from tools.gallery.recipe import GALLERY, make

pytestmark = pytest.mark.audit

OF_GALLERY = {x.mistake for x in GALLERY.values()} - {"hang"}
DRAWN = [x for i, x in enumerate(WRONG_LOSSES) if i % 6 == 0 or x.mistake not in OF_GALLERY]
"""Mistakes that tests/testing/test_check.py does not diagnose in every run, and some others."""


@pytest.fixture(autouse=True)
def shrink_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "SHRINKING", 0.0)


def report(loss: Known, worlds: Worlds, **settings: Any) -> Report:
    settings |= {"call": loss.call, "name": loss.name, "max_examples": 30 if EVERY_CASE else 3}
    return examine(loss.make, world_sizes=(2, 3) if EVERY_CASE else (2,), worlds=worlds, **settings)


@pytest.mark.parametrize("loss", [x for x in RIGHT_LOSSES if EVERY_CASE or not x.searched], ids=str)
def test_a_right_loss_raises_no_alarm(loss: Known, worlds: Worlds) -> None:
    found = report(loss, worlds, width=loss.width)
    assert found.ok, str(found)


@pytest.mark.parametrize("loss", WRONG_LOSSES if EVERY_CASE else DRAWN, ids=str)
def test_the_mistake_of_a_wrong_loss_is_named(loss: Known, impatient: Worlds) -> None:
    found = report(loss, impatient)
    assert not found.ok
    assert found.diagnosis.mistake == loss.mistake, str(found)


def test_a_loss_that_rounds_is_said_to(worlds: Worlds) -> None:
    (loss,) = (x for x in RIGHT_LOSSES if x.name == "in float32")
    assert report(loss, worlds).notes == ["computes in float32"]


def test_sums_are_rounded_where_embeddings_are_not(worlds: Worlds) -> None:
    (loss,) = (x for x in RIGHT_LOSSES if x.name == "sharded anchors in float32")
    batch = GlobalBatch(
        (3, 2, 2), d=1, labels="same", kind="clustered", seed=6
    )  # normalised, every embedding is 1 or −1
    trial = Trial(Case(loss.make, loss.call), batch, worlds)
    assert trial.with_noise is not None
    assert 0 < trial.with_noise.tolerance < 1e-6
    same_value(trial.with_noise)


def test_a_wrong_loss_that_draws_is_found(impatient: Worlds) -> None:
    def with_dropout(embeddings, labels):
        return make("ignored grad_output")(F.dropout(embeddings, 0.2), labels)

    found = examine(lambda: with_dropout, call="labels", world_sizes=(2,), max_examples=2, worlds=impatient)
    assert "scales_with_grad_output" in [str(x.invariant) for x in found.findings]


def test_a_wrong_loss_that_rounds_is_found(impatient: Worlds) -> None:
    def in_float32(view1, view2):
        return (view1.float() - view2.float()).square().mean()

    found = examine(lambda: in_float32, call="views", world_sizes=(2,), max_examples=3, worlds=impatient)
    assert found.diagnosis is not None
    assert found.diagnosis.mistake == "local negatives"
