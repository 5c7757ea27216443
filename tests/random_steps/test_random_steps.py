"""Random trainings: every step is right, or refused with the same words on every rank, whatever came before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contrastive_zoo.testing.catalogue import CATALOGUE
from contrastive_zoo.testing.worlds import RankError, Worlds
from tests.helpers import EVERY_CASE
from tests.random_steps.changes import of_user_code
from tests.random_steps.losses import LOSSES, OF_ZOO, can_ring
from tests.random_steps.rank import Action, play

THRESHOLDS = {
    "contrastive_zoo.engine.plan:SMALL_MATRIX": (2**18, -1, 12),
    "contrastive_zoo.engine.tiling:BLOCK_BYTES": (32 * 2**20, 64, 300),
    "contrastive_zoo.engine.tiling:TILE_BYTES": (4 * 2**20, 64, 300),
    "contrastive_zoo.engine.plan:SMALL_BATCH": (2**28, -1, 2**12),
    "contrastive_zoo.ranks.handshake:PAYLOAD_LIMIT": (2**20, 0, 200),
    "contrastive_zoo.ranks.world:SMALL_MESSAGE": (2**18, 0, 300),
    "contrastive_zoo.ranks.world:FEW_RANKS": (64, 64, 0),
}
"""Every constant at which an engine or a message takes another path: as it is, and so small that tiny batches meet it."""

SHARED = {name: values[1] for name, values in THRESHOLDS.items()}
"""Ranks share the work of every batch."""
MANY = {"contrastive_zoo.ranks.world:FEW_RANKS": 0}
"""Messages of two ranks are those of many."""

TIMEOUT = 60.0
"""Seconds that one program may take, on a busy machine too."""
STEPS, CHANGES = int(os.environ.get("SEARCH_STEPS", "10000")), int(os.environ.get("SEARCH_CHANGES", "2500"))


def actions(name: str, world_size: int) -> st.SearchStrategy[Action]:
    """Draw one action that this loss allows."""
    loss = LOSSES[name]
    sizes = st.sampled_from([3, 0, 1, 2, 5, 9])
    batch = st.lists(sizes, min_size=world_size, max_size=world_size).filter(any).map(tuple)
    one, several = st.lists(batch, min_size=1, max_size=1), st.lists(batch, min_size=4, max_size=4)

    def action(action: str, **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Action]:
        return st.tuples(st.just(action), st.fixed_dictionaries(arguments))

    of = st.sampled_from
    drawn = [
        action("step", batches=one),
        action("step", batches=one, encoder=of(["plain", "GradCache"])),
        action("step", batches=st.lists(batch, min_size=2, max_size=2), backward=of(["each", "together"])),
        action("step", batches=one, backward=st.just("twice")),
        action("step", batches=one, wrapper=st.just("second")),
        action("evaluate", batch=batch, how=of(["no_grad", "eval"])),
        action("set_budget", size=of([None, 0, 100])),
        action("set_option", grad_reduction=of(["sum", "mean"])),
        *[action("change", batches=several, group=st.integers(0, 9), number=st.integers(0, 99))] * 3,
    ]
    if name.startswith("hides"):
        drawn += [action("change", batches=several, number=st.integers(0, 99), everywhere=st.just(True))] * 2
    drawn += [action("set_setting", value=of(loss.setting[1]))] if loss.setting and not loss.user_code else []
    copies = ["wrapper"]
    if not loss.user_code:
        is_local = "<locals>" in type(loss.make()).__qualname__  # which nothing pickles
        copies += ["deepcopy", "state_dict"] + ["pickle"] * (not is_local)
        drawn += [action("set_precision", precision=of(["float64", "float32", "autocast"]))]
        drawn += [
            action("step", batches=st.lists(batch, min_size=1, max_size=3), together=st.just(True))
        ] * loss.remembers
        drawn += [action("set_hook", on=st.booleans())] * (not loss.sharded)
    drawn += [action("make_again", on=of(["all", "one"]), how=of(copies))]
    drawn += [action("step", batches=one, reentrant=st.just(False))] * (not loss.remembers)
    drawn += [action("step", batches=one, wrapper=st.just("subgroup"))] * (not (loss.remembers or loss.sharded))
    drawn += [action("set_option", ring=st.booleans())] * can_ring(name)
    return st.integers(0, len(drawn) - 1).flatmap(drawn.__getitem__)


class Search:
    """Runs programs, and counts what ran."""

    def __init__(self) -> None:
        self.worlds, self.steps, self.changes = Worlds(), 0, 0

    def run(self, most_actions: int, **options: Any) -> None:
        @settings(deadline=None, suppress_health_check=list(HealthCheck), **options)
        @given(st.data())
        def search(data: st.DataObject) -> None:
            name, world_size = data.draw(st.sampled_from(list(LOSSES))), data.draw(st.sampled_from([2, 3]))
            thresholds = {key: data.draw(st.sampled_from(values), key) for key, values in THRESHOLDS.items()}
            program = data.draw(st.lists(actions(name, world_size), min_size=1, max_size=most_actions))
            self.play(name, world_size, thresholds, program)

        search()

    def play(self, name: str, world_size: int, thresholds: dict[str, int], program: list[Action]) -> None:
        if LOSSES[name].third_party:  # seconds in a fresh process, which are no hang
            self.worlds.run(world_size, LOSSES[name].make, timeout=120)
        try:
            played = self.worlds.run(world_size, play, name, thresholds, program, timeout=TIMEOUT)
        except RankError as error:
            self.worlds.close()  # a group that failed stays so, and would fail any other program
            self.worlds = Worlds()
            lines = [f"  {action}({', '.join(f'{k}={x!r}' for k, x in a.items())})" for action, a in program]
            told = "\n".join([f"{name}, W={world_size}, {thresholds}:", *lines, str(error)])
            raise AssertionError(told) from None
        assert played[1:] == played[:-1]
        self.steps += played[0].actions
        self.changes += len(played[0].ends)


@pytest.fixture
def search() -> Iterator[Search]:
    found = Search()
    yield found
    found.worlds.close()


def test_random_steps_are_right_or_refused(search: Search, capsys: pytest.CaptureFixture[str]) -> None:
    if not EVERY_CASE:
        search.run(8, max_examples=30)
        return
    while search.steps < STEPS or search.changes < CHANGES:
        search.run(20, max_examples=50, database=None)
        with capsys.disabled():
            print(f"\n{search.steps} of {STEPS} steps, {search.changes} of {CHANGES} changes", end="", flush=True)


def test_every_loss_that_can_ring_is_here() -> None:
    of_catalogue = {
        type(loss) for loss in (entry.make() for entry in CATALOGUE.values()) if loss.ring_problem() is None
    }
    made = [LOSSES[name].make() for name in LOSSES if can_ring(name)]
    missing = {x for x in of_catalogue if not any(isinstance(loss, x) for loss in made)}
    assert not missing, f"{missing}: add them to LOSSES in tests/random_steps/losses.py, with what they are called with"


def steps(**more: Any) -> list[Action]:
    return [("step", {"batches": [sizes], **more}) for sizes in ((3, 2), (0, 4), (4, 0), (1, 1), (5, 2))]


ELSEWHERE = {name for name, loss in OF_ZOO.items() if not loss.remembers}  # in tests/test_contract.py
DRAWN = [(i, name) for i, name in enumerate(LOSSES) if EVERY_CASE or i % 4 == 0 or name not in ELSEWHERE]


@pytest.mark.parametrize(("number", "name"), DRAWN, ids=[name for _, name in DRAWN])
def test_steps_of_every_loss_are_those_of_one_process(number: int, name: str, worlds: Worlds) -> None:
    """What the search begins with, so that what it finds is a matter of several actions: small batches and shared work."""
    loss = LOSSES[name]
    if loss.third_party:
        worlds.run(2, loss.make)
    reentrant = None if loss.remembers else number % 4 == 0
    half = [("set_option", {"grad_reduction": "sum"}), *steps(reentrant=reentrant)]
    if loss.remembers and not loss.user_code:
        half += [("step", {"batches": [(3, 4), (0, 5), (4, 2)], "together": True}), *steps()[:1]]
    every = [{}, SHARED, SHARED | MANY]
    chosen = every if EVERY_CASE else every[number % 3 :][:1]
    for thresholds in chosen:
        ends_of(worlds, 2, name, thresholds, [*steps()[: 5 if EVERY_CASE else 3], *half])


def change(what: str, **more: Any) -> Action:
    return "change", {"batches": [(3, 5), (4, 4), (1, 7), (5, 3)], "what": what, **more}


def ends_of(worlds: Worlds, size: int, name: str, thresholds: dict[str, int], program: list[Action]) -> list[str]:
    runs = worlds.run(size, play, name, thresholds, program, timeout=TIMEOUT)
    assert runs == runs[:1] * size
    return runs[0].ends


def threads_after_programs() -> list[int]:
    program = [*steps()[:1], ("step", {"batches": [(3, 2)], "wrapper": "subgroup"})]
    return [len(os.listdir("/proc/self/task")) for _ in range(4) if play("Clip", {}, program)]


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="threads of a process are counted in Linux only")
def test_a_program_leaves_no_threads(worlds: Worlds) -> None:
    """Those of a process group outlive it unless it is destroyed, and thousands of programs run in one process."""
    for counts in worlds.run(2, threads_after_programs):
        assert counts[1:] == counts[:-1], counts


GROUPED = [("step", {"batches": [sizes], "wrapper": "subgroup"}) for sizes in ((2, 4, 3), (0, 1, 5))]
PROGRAMS: dict[str, tuple[int, str, dict[str, int], list[Action]]] = {
    **{
        f"one rank makes its wrapper again: {how}": (
            2, "Clip", {}, [*steps(), ("make_again", {"on": "one", "how": how}), *steps()]
        )
        for how in ("wrapper", "deepcopy", "pickle", "state_dict")
    },
    **{
        f"a ring of a group that leaves a rank out: {name}": (
            3, name, SHARED, [("set_option", {"ring": True}), *GROUPED]
        )
        for name in ("NTXent", "SigLIP", "Clip")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_right(name: str, worlds: Worlds) -> None:
    ends_of(worlds, *PROGRAMS[name])


HOOKS = "with hooks or a forward of its own"
DIFFERENCES = {
    ("a labelled memory", "the first number of memory.embeddings"): "memory.embeddings has norm",
    ("Held", "the loss.table['a'][0] grows"): "rank 1",
    ("a bank", "the loss.pointer grows"): "pointer",
    ("an empty bank", "a hook of the loss"): HOOKS,
    ("an empty bank", "a forward of the loss"): HOOKS,
    ("WeightedSum", "a backward hook of the loss"): HOOKS,
    ("Clip", "temperature.log_scale grows"): "parameters, buffers or settings differ between ranks",
    ("Clip", "temperature.log_scale is frozen"): ", learnt, rank 1 has float64",
    ("Clip", "temperature.log_scale in bfloat16"): "rank 1 has bfloat16",
    ("Clip", "a hook of the loss"): HOOKS,
    ("Clip", "a pre-hook of the loss"): HOOKS,
    ("Clip", "a backward hook of the loss"): HOOKS,
    ("Clip", "a forward of the loss"): HOOKS,
    ("Clip", "temperature in evaluation"): "training: rank 0 has True, rank 1 has False",
    ("Clip", "evaluation of the loss alone"): "the loss's training: rank 0 has True, rank 1 has False",
    ("Clip", "no gradients"): "carry a gradient",
    ("NTXent", "inference mode"): "carry a gradient",
    ("Clip", "grad_reduction=sum"): "grad_reduction: rank 0 has mean, rank 1 has sum",
    ("Clip", "an argument less"): "rank 1",
    ("hides in compute", "a number in a closure"): "the same samples",
    ("hides in rows", "a number in a closure"): "the same anchor",
    ("closure", "power grows"): "its last value came out differently",
}
"""What the last of two ranks changes of a loss, with words of all ranks' error; the search has the other changes."""


@pytest.mark.parametrize(("name", "what"), DIFFERENCES)
def test_a_difference_between_ranks_is_named(name: str, what: str, worlds: Worlds) -> None:
    thresholds = SHARED | MANY if "hides" in name or list(DIFFERENCES).index((name, what)) % 2 else {}
    (said,) = ends_of(worlds, 2, name, thresholds, [*steps()[:2], change(what), *steps()])
    assert DIFFERENCES[name, what] in said


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", ["hides in rows", "hides in compute"])
def test_code_of_the_user_that_is_equal_on_all_ranks(name: str, shared: bool, worlds: Worlds) -> None:
    """Hidden numbers are right; private generators and unshared parameters where each rank computes everything."""
    for what, right in [(x.what, x.right) for x in of_user_code(LOSSES[name].make())]:
        program = [*steps()[:1], change(what, everywhere=True)]
        (end,) = ends_of(worlds, 2, name, SHARED if shared else {}, program)
        assert (end == "right") == (right or not shared), (what, end)
