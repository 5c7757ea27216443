"""Sums of losses, and of one loss over prefixes."""

from collections.abc import Callable
from typing import Any

import pytest

import contrastive_zoo as cz
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.invariants import CONTRACT
from contrastive_zoo.testing.measurement import Case, Trial
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import close, numbers
from tests.zoo import BatchHard


def nested_views() -> cz.WeightedSum:
    """Whole rows, prefixes, and rows that are not normalised; one and two towers, by both engines; one temperature."""
    t = cz.LearnableTemperature(0.5)
    prefixes = cz.Matryoshka(cz.InfoNCE(temperature=t, symmetric=True), dims=(2, 4), weights=[0.5, 2.0])
    losses = [cz.NTXent(temperature=t), prefixes, cz.InfoNCE(normalize=False), cz.DCL(), cz.AlignUniform(), BatchHard()]
    return cz.WeightedSum(losses, weights=[1.0, 0.3, 1.0, 1.0, 1.0, -0.1])


def nested_classes() -> cz.WeightedSum:
    return cz.WeightedSum(
        [cz.Matryoshka(cz.SupCon(), dims=(2, 3, 5)), cz.NCA(), cz.SupCon(normalize=False), BatchHard()]
    )


@pytest.mark.parametrize(("make", "call"), [(nested_views, "views"), (nested_classes, "labels")])
@pytest.mark.parametrize("shards", [(1, 4), (0, 3, 2)], ids=str)
def test_the_contract_holds(make: Callable[[], Any], call: Any, shards: tuple[int, ...], worlds: Worlds) -> None:
    """Of prefixes wider than those of the table of losses; tests/test_explain.py counts that rows are sent once."""
    trial = Trial(Case(lambda: cz.DistributedLoss(make()), call=call), GlobalBatch(shards, d=5, seed=5), worlds)
    for invariant in CONTRACT:
        invariant(trial)


def test_negatives_are_cut_as_well() -> None:
    q, k, shared, own = (numbers(*shape, seed=i) for i, shape in enumerate([(4, 3), (4, 3), (5, 3), (4, 2, 3)]))
    ours, plain = cz.Matryoshka(cz.InfoNCE(), (2, 3)), cz.InfoNCE()
    for x in (shared, own):
        close(ours(q, k, negatives=x), plain(q[:, :2], k[:, :2], x[..., :2]) + plain(q, k, x))


def test_anchors_may_be_kept_apart() -> None:
    a, b = numbers(5, 3, seed=0), numbers(5, 3, seed=1)
    losses = [cz.NTXent(reduction="none"), cz.NTXent(temperature=0.5, reduction="none")]
    close(cz.WeightedSum(losses)(a, b), losses[0](a, b) + losses[1](a, b))
