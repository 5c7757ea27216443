"""One rank changes one thing at a random step: every rank has one process's numbers, or refuses that very step."""

import functools
import os
import random
from unittest.mock import patch

import pytest

from contrastive_zoo.testing.worlds import Worlds
from tests.adversary import Trial, play
from tests.helpers import EXACT
from tests.one_rank import LOSSES, SHARDS, STATEFUL, Outcome, alone, largest_error

TRIALS = int(os.environ.get("ADVERSARIAL", "5000")) if os.environ.get("HYPOTHESIS_PROFILE") == "long" else 60
IN_ONE_JOB = 20

reference = functools.lru_cache(maxsize=None)(alone)


def verdict(trial: Trial, ranks: list[list[Outcome]]) -> str | None:
    """What is wrong with the outcome, in words; None if nothing is."""
    lengths, refusals = {len(x) for x in ranks}, {x[-1].refused for x in ranks}
    if len(lengths) > 1 or len(refusals) > 1:
        return f"ranks end differently: {[(len(x) - 1, x[-1].refused[:200]) for x in ranks]}"
    (length,), (refused,) = lengths, refusals
    if refused and length - 1 != trial.at:
        return f"refused at step {length - 1}, changed at {trial.at}: {refused[:200]}"
    if not refused and length != len(SHARDS):
        return f"{length} steps"
    whole = reference(trial.name)
    for step in range(length - bool(refused)):
        if (error := largest_error([x[step] for x in ranks], whole[step])) > EXACT:
            return f"another number, by {error:.2g}, at step {step}, changed at {trial.at}"
    return None


def searched(trials: list[Trial], world_size: int, worlds: Worlds) -> list[str]:
    """What is wrong, one line a trial."""
    by_rank = worlds.run(world_size, play, trials, timeout=120)
    lines = []
    for trial, *outcomes in zip(trials, *by_rank, strict=True):
        if (problem := verdict(trial, [x for _, x in outcomes])) is not None:
            lines.append(f"{trial}, {outcomes[0][0]}, W={world_size}: {problem}")
    return lines


def drawn(count: int, seed: int) -> list[Trial]:
    generator, names = random.Random(seed), [x for x in LOSSES if x not in STATEFUL or "annealed" in x]
    return [
        Trial(
            generator.choice(names),
            generator.random() < 0.5,
            generator.randrange(len(SHARDS)),
            generator.randrange(2**31),
        )
        for _ in range(count)
    ]


def blindly(trials: list[Trial]) -> list[tuple[str, list[Outcome]]]:
    """On every rank: the mutant, which does not look at numbers."""
    with patch("contrastive_zoo.loss_base.loss_modules._level", lambda sizes: 0.0):
        return play(trials)


def test_the_search_notices_what_ranks_do_not_compare(worlds: Worlds) -> None:
    trials = [trial._replace(name="Held") for trial in drawn(60, seed=0)]
    by_rank = worlds.run(2, blindly, trials, timeout=120)
    problems = [verdict(x, [y for _, y in ranks]) for x, *ranks in zip(trials, *by_rank, strict=True)]
    assert any("another number" in (problem or "") for problem in problems)


def test_whatever_one_rank_changes(worlds: Worlds, capsys: pytest.CaptureFixture[str]) -> None:
    lines = []
    for first in range(0, TRIALS, IN_ONE_JOB):
        lines += searched(drawn(IN_ONE_JOB, seed=first), 2 + first // IN_ONE_JOB % 2, worlds)
        if TRIALS > 60 and first % 500 == 0:
            with capsys.disabled():
                print(f"\n{first} of {TRIALS}, {len(lines)} wrong", end="", flush=True)
    assert not lines, "\n".join(lines)
