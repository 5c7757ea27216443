"""Random trainings: every step is right, or refused with the same words on every rank; mutants of that are noticed."""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import contrastive_zoo as cz
from contrastive_zoo.ranks.handshake import shake_hands
from contrastive_zoo.testing.worlds import RankError, Worlds
from tests.helpers import EVERY_CASE
from tests.random_steps.changes import of_user_code
from tests.random_steps.losses import LOSSES, OF_ZOO, RINGS
from tests.random_steps.rank import Action, play

THRESHOLDS = {
    "engine.plan.SMALL_MATRIX": (2**19, -1, 12),
    "engine.plan.SMALL_PLAIN": (2**15, -1, 12),
    "engine.tiling.BLOCK_BYTES": (32 * 2**20, 64, 300),
    "engine.tiling.TILE_BYTES": (4 * 2**20, 64, 300),
    "engine.plan.SMALL_BATCH": (2**28, -1, 2**12),
    "ranks.handshake.PAYLOAD_LIMIT": (2**20, 0, 200),
    "ranks.world.SMALL_MESSAGE": (2**18, 0, 300),
}
"""Every constant at which an engine or a message takes another path: as it is, and so small that tiny batches meet it."""

SHARED = {name: values[1] for name, values in THRESHOLDS.items()}
"""Ranks share the work of every batch."""

Program = tuple[int, str, dict[str, int], list[Action]]  # world size, loss, thresholds and actions


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
        *[action("change", batches=several, number=st.integers(0, 999))] * 3,
    ]  # fmt: skip
    if name.startswith("hides"):
        drawn += [action("change", batches=several, number=st.integers(0, 99), everywhere=[True])] * 2
    if not loss.user_code:
        drawn += [action("set_precision", precision=["float64", "float32", "autocast"])]
        drawn += [action("set_setting", value=loss.setting[1])] if loss.setting else []
        refuses_hooks = loss.sharded or loss.owners or name.startswith("MNRL")  # they see no indices of samples
        drawn += [action("set_hook", on=[True, False])] * (not refuses_hooks)
        drawn += [step(3, how=["one step"])] * loss.remembers
        drawn += [action("set_option", ring=[True, False])] * (name in RINGS)
    return of(drawn).flatmap(lambda x: x)


@st.composite
def programs(draw: st.DrawFn, most_actions: int) -> Program:
    name, world_size = draw(st.sampled_from(list(LOSSES))), draw(st.sampled_from([2, 3]))
    thresholds = {key: draw(st.sampled_from(values)) for key, values in THRESHOLDS.items()}
    return world_size, name, thresholds, draw(st.lists(actions(name, world_size), min_size=1, max_size=most_actions))


def played(worlds: Worlds, program: Program) -> list[str]:
    world_size, *others = program
    runs = worlds.run(world_size, play, *others, timeout=60)  # on a busy machine too
    assert runs == runs[:1] * world_size
    return runs[0]


@settings(max_examples=2 * settings().max_examples if EVERY_CASE else 30, suppress_health_check=list(HealthCheck))
@given(programs(20 if EVERY_CASE else 8))
def test_random_steps_are_right_or_refused(worlds: Worlds, program: Program) -> None:
    ends = ["CommunicationError, or any other"]
    try:
        ends = played(worlds, program)
    finally:
        if any(x.startswith("CommunicationError") for x in ends):
            worlds._discard(program[0])  # a group that failed stays so, and would fail any other program


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
    count, of_thresholds = (5, [{}, SHARED]) if EVERY_CASE else (3, [[{}, SHARED][number % 2]])
    half = [("set_option", {"grad_reduction": "sum"}), *steps(how=how)[:count]]
    if loss.remembers and not loss.user_code:
        half += [("step", {"batches": [(3, 4), (0, 5), (4, 2)], "how": "one step"}), *steps()[:1]]
    for thresholds in of_thresholds:
        played(worlds, (2, name, thresholds, [*steps()[:count], *half]))


AGAIN = [("make_again", {"on": "one", "how": how}) for how in ("wrapper", "deepcopy", "state_dict")]
IN_GROUPS = [("step", {"batches": [sizes], "how": "subgroup"}) for sizes in ((2, 4, 3), (0, 1, 5))]
PROGRAMS: list[Program] = [
    *((2, "Clip", {}, [*steps(), again, *steps()]) for again in AGAIN),
    (3, "SINCERE", {}, [("step", {"batches": [(3, 3, 3)]}), AGAIN[0], *steps(3)]),
    (3, "MagFace", SHARED, [*steps(3)[:1], IN_GROUPS[0], *steps(3)]),
    *((3, name, SHARED, [("set_option", {"ring": True}), *IN_GROUPS]) for name in ("NTXent", "SigLIP", "Clip")),
]
"""One rank makes its wrapper again, also while labels are looked at; another wrapper of a group sees the same parameters; a
ring of a group that leaves a rank out."""


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_is_right(program: Program, worlds: Worlds) -> None:
    played(worlds, program)


DIFFERENCES = {
    ("memory of SupCon", "the first number of memory.embeddings"): "memory.embeddings has norm",
    ("Held", "the loss.table['a'][0] grows"): "rank 1",
    ("a bank", "the loss.pointer grows"): "pointer",
    ("an empty bank", "a hook of the loss"): "with hooks or a forward of its own",
    ("an empty bank", "a forward of the loss"): "with hooks or a forward of its own",
    ("WeightedSum", "a backward hook of the loss"): "with hooks or a forward of its own",
    ("Clip", "temperature.log_scale is frozen"): ", learnt, rank 1 has float64",
    ("Clip", "temperature.log_scale in bfloat16"): "rank 1 has bfloat16",
    ("Clip", "evaluation of the loss alone"): "the loss's training: rank 0 has True, rank 1 has False",
    ("NTXent", "inference mode"): "carry a gradient",
    ("Clip", "grad_reduction=sum"): "grad_reduction: rank 0 has mean, rank 1 has sum",
    ("partial", "rows with the negative bit"): "right",
    ("hides in compute", "a number in a closure"): "the same samples",
    ("hides in rows", "a number in a closure"): "the same anchor",
    ("closure", "power grows"): "its last value must be equal",
}
"""What the last of two ranks changes of a loss, with words of all ranks' error; the search has other changes."""


@pytest.mark.parametrize(("name", "what"), DIFFERENCES)
def test_a_difference_between_ranks_is_named(name: str, what: str, worlds: Worlds) -> None:
    thresholds = SHARED if "hides" in name or list(DIFFERENCES).index((name, what)) % 2 else {}
    (said,) = played(worlds, (2, name, thresholds, [*steps()[:2], change(what), *steps()]))
    assert DIFFERENCES[name, what] in said


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", ["hides in rows", "hides in compute"])
def test_code_of_the_user_that_is_equal_on_all_ranks(name: str, shared: bool, worlds: Worlds) -> None:
    """Hidden numbers are right; private generators and unshared parameters where each rank computes everything."""
    for what, right in [(x.what, x.right) for x in of_user_code(LOSSES[name].make())]:
        for even in ({}, {"batches": [(3, 3)] * 4}):  # of equal shards generators of all ranks stay in step
            program = [*steps()[:1], change(what, everywhere=True, **even)]
            (end,) = played(worlds, (2, name, SHARED if shared else {}, program))
            assert (end == "right") == (right or not shared), (what, even, end)


def keeps_a_problem_to_itself(statement: Any, session: Any) -> Any:
    if statement.problem:
        raise ValueError(statement.problem)
    return shake_hands(statement, session)


def swallows_errors_on_rank_0(self: cz.DistributedLoss, *args: Any) -> Any:
    with nullcontext() if dist.get_rank() else suppress(ValueError):
        return nn.Module.__call__(self, *args)
    return args[0].sum()


RESULTS = {"ranks.handshake.results_difference": lambda *_: None}
EMBEDDINGS = {"wrapper.step.scale_gradient": lambda x, size: x}
PARAMETERS = {"engine.batch.Batch.shared": lambda batch, x: x, **RESULTS}
NUMBERS = {"ranks.fingerprint.level_of": lambda pairs: 0.0, **RESULTS}
WORDS = {"ranks.handshake.statements_difference": lambda texts: f"rank {dist.get_rank()} says otherwise"}
CALL = {"wrapper.distributed.DistributedLoss.__call__": swallows_errors_on_rank_0}
HANDSHAKE = {"wrapper.step.shake_hands": keeps_a_problem_to_itself}
HANGS = "one rank refuses, and the others wait"
UNSHARED, FLOAT32 = change("an unshared parameter", everywhere=True), change("float32 rows")
MUTANTS: dict[str, tuple[dict[str, Callable[..., Any]], str, list[Action], str]] = {
    "embeddings get one rank's share of their gradient": (EMBEDDINGS, "SupCon", steps(), "of the embeddings: error"),
    "a parameter gets one rank's share of its gradient": (PARAMETERS, "hides in compute", steps(), "parameters: error"),
    "numbers are not compared": (NUMBERS, "Held", [change("the loss.scale grows")], "scale grows: not refused at once"),
    "behaviour is not compared": (RESULTS, "hides in rows", [change("a number in a closure")], "never refused: "),
    "gradients are not compared": (RESULTS, "hides in compute", [UNSHARED], "never refused: gradient of the loss's"),
    "ranks refuse with different words": (WORDS, "Clip", [FLOAT32], "with different words"),
    "one rank does not refuse": (CALL, "Clip", [FLOAT32], "only some ranks refuse"),
    HANGS: (HANDSHAKE, "Clip", [change("NaN rows")], "no answer within"),
}


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.audit] * (x == HANGS)) for x in MUTANTS])
def test_a_mutant_is_noticed(name: str, impatient: Worlds) -> None:
    patches, loss, program, words = MUTANTS[name]
    with pytest.raises(RankError, match=words):
        impatient.run(2, play, loss, SHARED | patches, program)
