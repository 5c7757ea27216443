"""Mining keeps its invariants, and each of them catches its mistake."""

import pytest
import torch

import contrastive_zoo as cz
from contrastive_zoo.testing.invariant import Broken, Invariant
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import numbers
from tests.mining.invariants import MINING_INVARIANTS, MISTAKES, Mine, MiningTrial


def trial(mine: Mine, worlds: Worlds) -> MiningTrial:
    rows = {
        "queries": numbers(20, 4, seed=0),
        "corpus": numbers(40, 4, seed=1),
        "positives": torch.arange(20),
    }
    settings = {"num_negatives": 2, "range_max": 8, "sampling": "random"}
    return MiningTrial(mine, rows, (9, 11), (17, 23), settings, worlds)


@pytest.mark.parametrize("invariant", MINING_INVARIANTS, ids=str)
def test_each_invariant_catches_its_mistake(invariant: Invariant[MiningTrial], worlds: Worlds) -> None:
    assert invariant(trial(cz.data.mine_hard_negatives, worlds))
    with pytest.raises(Broken):
        invariant(trial(MISTAKES[invariant.catches], worlds))
