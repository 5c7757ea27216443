"""Random samplers keep the invariants, and each invariant catches its mistake."""

import pytest

from contrastive_zoo.data.batch_sampler import BaseBatchSampler
from contrastive_zoo.testing.invariant import Broken, Invariant
from tests.sampling.cases import KINDS, random_trial
from tests.sampling.invariants import SAMPLER_INVARIANTS, SamplerTrial
from tests.sampling.mistakes import MISTAKES

CASES = 25
"""Cases of each sampler; ``benchmarks/samplers.py --search`` runs as many as one asks for."""


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_random_samplers_keep_the_invariants(kind: type[BaseBatchSampler]) -> None:
    tested = [invariant(random_trial(seed, [kind])) for seed in range(CASES) for invariant in SAMPLER_INVARIANTS]
    assert sum(tested) >= 5 * CASES


@pytest.mark.parametrize("invariant", SAMPLER_INVARIANTS, ids=str)
def test_each_invariant_catches_its_mistake(invariant: Invariant[SamplerTrial]) -> None:
    def search() -> None:
        for seed in range(40):
            invariant(random_trial(seed, [MISTAKES[invariant.catches]]))

    with pytest.raises(Broken, match=r"\d"):
        search()


def test_every_mistake_is_caught() -> None:
    assert {invariant.catches for invariant in SAMPLER_INVARIANTS} == set(MISTAKES)
