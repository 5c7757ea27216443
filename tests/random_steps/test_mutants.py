"""Random steps notice what they are for: mutants of the library, each with a program that must fail, and its words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

import contrastive_zoo as cz
from contrastive_zoo.ranks.handshake import shake_hands
from contrastive_zoo.testing.worlds import RankError, Worlds
from tests.random_steps.rank import Action, Played, limits, play
from tests.random_steps.test_random_steps import SHARED, change, steps

call = cz.DistributedLoss.forward


def handshake_that_names_its_rank(*args: Any) -> Any:
    try:
        return shake_hands(*args)
    except ValueError as error:
        raise ValueError(f"{error} This is rank {dist.get_rank()}.") from None


def handshake_that_keeps_a_problem_to_itself(statement: Any, session: Any) -> Any:
    if statement.problem:
        raise ValueError(statement.problem)
    return shake_hands(statement, session)


def call_that_swallows_errors_on_rank_0(self: cz.DistributedLoss, *args: Any, **named: Any) -> Any:
    try:
        return call(self, *args, **named)
    except ValueError:
        if dist.get_rank():
            raise
        return args[0].sum()


RESULTS = {"contrastive_zoo.ranks.handshake.results_difference": lambda *_: None}
HANGS = "one rank refuses, and the others wait"
MUTANTS: dict[str, tuple[dict[str, Callable[..., Any]], str, list[Action], str]] = {
    "embeddings get one rank's share of their gradient": (
        {"contrastive_zoo.wrapper.step.scale_gradient": lambda x, size: x},
        "SupCon",
        steps(),
        "AssertionError: gradient of the embeddings: error",
    ),
    "a parameter gets one rank's share of its gradient": (
        {"contrastive_zoo.engine.batch.Batch.shared": lambda batch, x: x, **RESULTS},
        "hides in compute",
        steps(),
        "AssertionError: gradient of the loss's parameters: error",
    ),
    "numbers are not compared": (
        {"contrastive_zoo.ranks.fingerprint.level_of": lambda pairs: 0.0, **RESULTS},
        "Held",
        [change("the loss.scale grows")],
        "the loss.scale grows: [",
    ),
    "behaviour is not compared": (RESULTS, "hides in rows", [change("a number in a closure")], "never refused"),
    "ranks refuse with different words": (
        {"contrastive_zoo.wrapper.step.shake_hands": handshake_that_names_its_rank},
        "Clip",
        [change("float32 rows")],
        "float32 rows: ranks refuse with different words",
    ),
    "one rank does not refuse": (
        {"contrastive_zoo.wrapper.distributed.DistributedLoss.forward": call_that_swallows_errors_on_rank_0},
        "Clip",
        [change("float32 rows")],
        "float32 rows: only some ranks refuse",
    ),
    HANGS: (
        {"contrastive_zoo.wrapper.step.shake_hands": handshake_that_keeps_a_problem_to_itself},
        "Clip",
        [change("NaN rows")],
        "no answer within",
    ),
}


def mutated(name: str) -> Played:
    patches, loss, program, _ = MUTANTS[name]
    with limits(patches):
        return play(loss, SHARED, program)


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.audit] * (x == HANGS)) for x in MUTANTS])
def test_a_mutant_is_noticed(name: str, impatient: Worlds) -> None:
    with pytest.raises(RankError) as caught:
        impatient.run(2, mutated, name)
    assert MUTANTS[name][-1] in str(caught.value)
