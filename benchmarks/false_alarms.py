"""Test the invariants on right losses and right training steps with random batches; every finding is a false alarm.

python benchmarks/false_alarms.py [examples]
"""

import random
import sys

from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.gallery.recipe import GALLERY, TRAINING_STEPS
from contrastive_zoo.testing.invariants import CONTRACT, INVARIANTS, Broken, Invariant, finite_at_extremes
from contrastive_zoo.testing.trial import Trial
from contrastive_zoo.testing.worlds import Worlds


def broken(invariant: Invariant, trial: Trial) -> str | None:
    """Return the message of a broken invariant; None if it holds."""
    try:
        invariant(trial)
    except Broken as complaint:
        return str(complaint)
    return None


def main(examples: int = 2000) -> None:
    """Test right recipes in turn: all invariants on every fourth batch, those of the contract on the others."""
    right = [recipe for recipe in (*GALLERY.values(), *TRAINING_STEPS.values()) if recipe.mistake is None]
    generator, alarms = random.Random(0), 0
    with Worlds(timeout=60.0) as worlds:
        for index in range(examples):
            recipe = right[index % len(right)]
            shards = [generator.randint(0, 6) for _ in range(generator.choice([2, 2, 3, 4]))]
            shards[-1] += max(0, 2 - sum(shards))
            batch = GlobalBatch(
                tuple(shards),
                d=generator.randint(1, 6),
                labels=generator.choice(["mixed", "singletons", "same", "distinct"]),
                kind=generator.choice(["gaussian", "clustered"]),
                seed=generator.randint(0, 9999),
            )
            trial = Trial(recipe.case, batch, worlds)
            for invariant in INVARIANTS if index % 4 == 0 else CONTRACT:
                complaint = None if invariant is finite_at_extremes else broken(invariant, trial)
                if complaint is not None:
                    alarms += 1
                    print(f"{recipe.name}, {batch!r}, {invariant}: {complaint}", flush=True)
    print(f"{examples} batches, {alarms} false alarms")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
