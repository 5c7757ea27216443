"""Random trainings: every step is right, or refused with the same words on every rank; mutants of that are noticed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import contrastive_zoo as cz
from contrastive_zoo.ranks.handshake import shake_hands
from contrastive_zoo.testing.worlds import RankError, Worlds
from tests.helpers import EVERY_CASE
from tests.random_steps.changes import of_user_code
from tests.random_steps.losses import LOSSES, OF_ZOO, can_ring
from tests.random_steps.rank import Action, Played, Swapped, limits, play

THRESHOLDS = {
    "contrastive_zoo.engine.plan:SMALL_MATRIX": (2**18, -1, 12),
    "contrastive_zoo.engine.tiling:BLOCK_BYTES": (32 * 2**20, 64, 300),
    "contrastive_zoo.engine.tiling:TILE_BYTES": (4 * 2**20, 64, 300),
    "contrastive_zoo.engine.plan:SMALL_BATCH": (2**28, -1, 2**12),
    "contrastive_zoo.ranks.handshake:PAYLOAD_LIMIT": (2**20, 0, 200),
    "contrastive_zoo.ranks.world:SMALL_MESSAGE": (2**18, 0, 300),
}
"""Every constant at which an engine or a message takes another path: as it is, and so small that tiny batches meet it."""

SHARED = {name: values[1] for name, values in THRESHOLDS.items()}
"""Ranks share the work of every batch."""

TIMEOUT = 60.0
"""Seconds that one program may take, on a busy machine too."""
STEPS, CHANGES = int(os.environ.get("SEARCH_STEPS", "10000")), int(os.environ.get("SEARCH_CHANGES", "2500"))

Program = tuple[int, str, dict[str, int], list[Action]]
"""World size, loss, thresholds and actions."""


def actions(name: str, world_size: int) -> st.SearchStrategy[Action]:
    """Draw one action that this loss allows."""
    loss, of = LOSSES[name], st.sampled_from
    batch = st.lists(of([3, 0, 1, 2, 5, 9]), min_size=world_size, max_size=world_size).filter(any).map(tuple)
    several = st.lists(batch, min_size=4, max_size=4)

    def action(action: str, **arguments: Any) -> st.SearchStrategy[Action]:
        drawn = {key: x if isinstance(x, st.SearchStrategy) else of(x) for key, x in arguments.items()}
        return st.tuples(st.just(action), st.fixed_dictionaries(drawn))

    def step(most: int = 1, **arguments: list[Any]) -> st.SearchStrategy[Action]:
        return action("step", batches=st.lists(batch, min_size=1, max_size=most), **arguments)

    ways = ["second wrapper", "no_grad", "eval"] + ["subgroup"] * (not (loss.remembers or loss.sharded))
    drawn = [
        step(),
        step(how=ways + ["checkpoint"] * (not loss.remembers)),
        step(2, backward=["each", "together", "twice"]),
        action("set_budget", size=[None, 0, 100]),
        action("set_option", grad_reduction=["sum", "mean"]),
        action("make_again", on=["all", "one"], how=["wrapper", "deepcopy", "state_dict"][: 1 if loss.user_code else 3]),
        *[action("change", batches=several, group=st.integers(0, 9), number=st.integers(0, 99))] * 3,
    ]  # fmt: skip
    if name.startswith("hides"):
        drawn += [action("change", batches=several, number=st.integers(0, 99), everywhere=[True])] * 2
    if not loss.user_code:
        drawn += [action("set_precision", precision=["float64", "float32", "autocast"])]
        drawn += [action("set_setting", value=loss.setting[1])] if loss.setting else []
        refuses_hooks = loss.sharded or loss.owners or name.startswith("MNRL")  # they see no indices of samples
        drawn += [action("set_hook", on=[True, False])] * (not refuses_hooks)
        drawn += [step(3, how=["one step"])] * loss.remembers
        drawn += [action("set_option", ring=[True, False])] * can_ring(name)
    return of(drawn).flatmap(lambda x: x)


@st.composite
def programs(draw: st.DrawFn, most_actions: int) -> Program:
    name, world_size = draw(st.sampled_from(list(LOSSES))), draw(st.sampled_from([2, 3]))
    thresholds = {key: draw(st.sampled_from(values)) for key, values in THRESHOLDS.items()}
    return world_size, name, thresholds, draw(st.lists(actions(name, world_size), min_size=1, max_size=most_actions))


def played(worlds: Worlds, program: Program) -> Played:
    world_size, *others = program
    runs = worlds.run(world_size, play, *others, timeout=TIMEOUT)
    assert runs == runs[:1] * world_size
    return runs[0]


@pytest.fixture
def fresh() -> Iterator[list[Worlds]]:
    """Worlds whose last one is usable: a group that failed stays so, and would fail any other program."""
    found = [Worlds()]
    yield found
    found[-1].close()


def test_random_steps_are_right_or_refused(fresh: list[Worlds], capsys: pytest.CaptureFixture[str]) -> None:
    steps, changes = 0, 0

    def search(most_actions: int, **options: Any) -> None:
        @settings(deadline=None, suppress_health_check=list(HealthCheck), **options)
        @given(programs(most_actions))
        def run(program: Program) -> None:
            nonlocal steps, changes
            is_lost = True
            try:
                done = played(fresh[-1], program)
                is_lost = any(x.startswith("CommunicationError") for x in done.ends)
            finally:
                if is_lost:
                    fresh[-1].close()
                    fresh.append(Worlds())
            steps, changes = steps + done.actions, changes + len(done.ends)

        run()

    if not EVERY_CASE:
        search(8, max_examples=30)
        return
    while steps < STEPS or changes < CHANGES:
        search(20, max_examples=50, database=None)
        with capsys.disabled():
            print(f"\n{steps} of {STEPS} steps, {changes} of {CHANGES} changes", end="", flush=True)


def steps(world_size: int = 2, **more: Any) -> list[Action]:
    sizes = ((3, 2, 3), (0, 4, 1), (4, 0, 0), (1, 1, 2), (5, 2, 0))
    return [("step", {"batches": [x[:world_size]], **more}) for x in sizes]


def change(what: str, **more: Any) -> Action:
    return "change", {"batches": [(3, 5), (4, 4), (1, 7), (5, 3)], "what": what} | more


ELSEWHERE = {name for name, loss in OF_ZOO.items() if not loss.remembers}  # in tests/test_contract.py
DRAWN = [name for i, name in enumerate(LOSSES) if EVERY_CASE or i % 8 == 0 or name not in ELSEWHERE]


@pytest.mark.parametrize("name", DRAWN)
def test_steps_of_every_loss_are_those_of_one_process(name: str, worlds: Worlds) -> None:
    """What the search begins with, so that what it finds is a matter of several actions: small batches and shared work."""
    loss, number = LOSSES[name], DRAWN.index(name)
    how = "" if loss.remembers else ["reentrant checkpoint", "checkpoint"][number % 4 > 0]
    count = 5 if EVERY_CASE else 3
    half = [("set_option", {"grad_reduction": "sum"}), *steps(how=how)[:count]]
    if loss.remembers and not loss.user_code:
        half += [("step", {"batches": [(3, 4), (0, 5), (4, 2)], "how": "one step"}), *steps()[:1]]
    for thresholds in [{}, SHARED] if EVERY_CASE else [{}, SHARED][number % 2 :][:1]:
        played(worlds, (2, name, thresholds, [*steps()[:count], *half]))


IN_GROUPS = [("step", {"batches": [sizes], "how": "subgroup"}) for sizes in ((2, 4, 3), (0, 1, 5))]
PROGRAMS: dict[str, Program] = {
    **{
        f"one rank makes its wrapper again: {how}": (
            2, "Clip", {}, [*steps(), ("make_again", {"on": "one", "how": how}), *steps()]
        )
        for how in ("wrapper", "deepcopy", "state_dict")
    },
    "one rank makes its wrapper again, whose labels are still looked at": (
        3, "SINCERE", {}, [("step", {"batches": [(3, 3, 3)]}), ("make_again", {"on": "one", "how": "wrapper"}), *steps(3)]
    ),
    **{
        f"a ring of a group that leaves a rank out: {name}": (
            3, name, SHARED, [("set_option", {"ring": True}), *IN_GROUPS]
        )
        for name in ("NTXent", "SigLIP", "Clip")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_right(name: str, worlds: Worlds) -> None:
    played(worlds, PROGRAMS[name])


HOOKS = "with hooks or a forward of its own"
NUMBERED = r"which is wrapper number (\d) of this process; .* which is wrapper number (?!\1)\d of this process"
DIFFERENCES = {
    ("memory of SupCon", "the first number of memory.embeddings"): "memory.embeddings has norm",
    ("Held", "the loss.table['a'][0] grows"): "rank 1",
    ("a bank", "the loss.pointer grows"): "pointer",
    ("an empty bank", "a hook of the loss"): HOOKS,
    ("an empty bank", "a forward of the loss"): HOOKS,
    ("WeightedSum", "a backward hook of the loss"): HOOKS,
    ("Clip", "temperature.log_scale is frozen"): ", learnt, rank 1 has float64",
    ("Clip", "temperature.log_scale in bfloat16"): "rank 1 has bfloat16",
    ("Clip", "evaluation of the loss alone"): "the loss's training: rank 0 has True, rank 1 has False",
    ("NTXent", "inference mode"): "carry a gradient",
    ("Clip", "grad_reduction=sum"): "grad_reduction: rank 0 has mean, rank 1 has sum",
    ("partial", "rows with the negative bit"): "right",
    ("hides in compute", "a number in a closure"): "the same samples",
    ("hides in rows", "a number in a closure"): "the same anchor",
    ("closure", "power grows"): "its last value came out differently",
    ("NTXent", "first calls"): NUMBERED,
    ("NTXent", "later calls"): NUMBERED,
    ("NTXent", "backward passes"): "rank 0 is in the backward pass of NTXent, .* rank 1 is in the backward pass of NTX",
}
"""What the last of two ranks changes of a loss or swaps, with words of all ranks' error; the search has other changes."""


@pytest.mark.parametrize(("name", "what"), DIFFERENCES)
def test_a_difference_between_ranks_is_named(name: str, what: str, worlds: Worlds) -> None:
    swaps = what in get_args(Swapped)
    thresholds = SHARED if swaps or "hides" in name or list(DIFFERENCES).index((name, what)) % 2 else {}
    action = ("swap", {"what": what}) if swaps else change(what)
    (said,) = played(worlds, (2, name, thresholds, [*steps()[:2], action, *steps()])).ends
    assert re.search(DIFFERENCES[name, what], said), said


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", ["hides in rows", "hides in compute"])
def test_code_of_the_user_that_is_equal_on_all_ranks(name: str, shared: bool, worlds: Worlds) -> None:
    """Hidden numbers are right; private generators and unshared parameters where each rank computes everything.

    Generators of all ranks stay in step while their shards are equal.
    """
    for what, right in [(x.what, x.right) for x in of_user_code(LOSSES[name].make())]:
        for even in ({}, {"batches": [(3, 3)] * 4}):
            program = [*steps()[:1], change(what, everywhere=True, **even)]
            (end,) = played(worlds, (2, name, SHARED if shared else {}, program)).ends
            assert (end == "right") == (right or not shared), (what, even, end)


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
    "gradients are not compared": (
        RESULTS,
        "hides in compute",
        [change("an unshared parameter", everywhere=True)],
        "never refused: gradient of the loss's parameters",
    ),
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
