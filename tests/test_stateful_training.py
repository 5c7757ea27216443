"""Random trainings: after every action, value and all gradients are those of one process, whatever came before."""

import os
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from contrastive_zoo.testing.catalogue import CATALOGUE
from contrastive_zoo.testing.worlds import RankError, Worlds
from contrastive_zoo.wrapper.arguments import Arguments
from tests.helpers import EVERY_CASE
from tests.stateful_rank import LOSSES, Action, Loss, can_ring, play

THRESHOLDS = {
    "contrastive_zoo.engine.plan:SMALL_MATRIX": (2**18, -1, 12),
    "contrastive_zoo.engine.tiling:BLOCK_BYTES": (32 * 2**20, 64, 300),
    "contrastive_zoo.engine.tiling:TILE_BYTES": (4 * 2**20, 64, 300),
    "contrastive_zoo.engine.plan:SMALL_BATCH": (2**28, -1, 2**12),
    "contrastive_zoo.ranks.handshake:PAYLOAD_LIMIT": (2**20, 0, 200),
    "contrastive_zoo.ranks.world:SMALL_MESSAGE": (2**18, 0, 300),
}
"""Every constant at which an engine or a message takes another path: as it is, and so small that tiny batches meet it."""

TIMEOUT = 60.0
"""Seconds that one program may take, on a busy machine too."""
STEPS = int(os.environ.get("SEARCH_STEPS", "10000"))

SIZES = st.sampled_from([3, 0, 1, 2, 5, 9])


class Training(RuleBasedStateMachine):
    """A program is drawn rule by rule, and run when it is complete."""

    worlds: ClassVar[Worlds]
    steps: ClassVar[int] = 0

    @initialize(
        name=st.sampled_from(list(LOSSES)),
        world_size=st.sampled_from([2, 3]),
        thresholds=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in THRESHOLDS.items()}),
    )
    def begin(self, name: str, world_size: int, thresholds: dict[str, int]) -> None:
        self.name, self.world_size, self.thresholds = name, world_size, thresholds
        self.program: list[Action] = []

    @property
    def loss(self) -> Loss:
        return LOSSES[self.name]

    def then(self, action: str, **arguments: Any) -> None:
        self.program.append((action, arguments))

    def batch(self, data: st.DataObject) -> tuple[tuple[int, ...], int]:
        """Shard sizes and a seed; somebody has something."""
        sizes = data.draw(st.lists(SIZES, min_size=self.world_size, max_size=self.world_size).filter(any), "shards")
        return tuple(sizes), 10 * len(self.program)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self.then("step", batches=[self.batch(data)])

    @rule(data=st.data(), how=st.sampled_from(["no_grad", "eval"]))
    def evaluate(self, data: st.DataObject, how: str) -> None:
        self.then("evaluate", batch=self.batch(data), how=how)

    @rule(data=st.data(), backward=st.sampled_from(["each", "together"]))
    def several_calls(self, data: st.DataObject, backward: str) -> None:
        """Gradients accumulate, or several calls come before one backward pass."""
        (shards, seed), (others, _) = self.batch(data), self.batch(data)
        self.then("step", batches=[(shards, seed), (others, seed + 1)], backward=backward)

    @rule(data=st.data())
    def retain_graph(self, data: st.DataObject) -> None:
        self.then("step", batches=[self.batch(data)], backward="twice")

    @precondition(lambda self: not self.loss.remembers)
    @rule(data=st.data())
    def checkpointed(self, data: st.DataObject) -> None:
        self.then("step", batches=[self.batch(data)], reentrant=False)

    @rule(data=st.data())
    def second_wrapper(self, data: st.DataObject) -> None:
        self.then("step", batches=[self.batch(data)], wrapper="second")

    @precondition(lambda self: not (self.loss.remembers or self.loss.sharded))
    @rule(data=st.data())
    def subgroup(self, data: st.DataObject) -> None:
        self.then("step", batches=[self.batch(data)], wrapper="subgroup")

    @rule(data=st.data())
    def set_setting(self, data: st.DataObject) -> None:
        self.then("set_setting", value=data.draw(st.sampled_from(self.loss.setting[1]), "value"))

    @rule(precision=st.sampled_from(["float64", "float32", "autocast"]))
    def set_precision(self, precision: str) -> None:
        self.then("set_precision", precision=precision)

    @precondition(lambda self: not self.loss.sharded)
    @rule(on=st.booleans())
    def set_hook(self, on: bool) -> None:
        self.then("set_hook", on=on)

    @rule(size=st.sampled_from([None, 0, 100]))
    def set_budget(self, size: int | None) -> None:
        self.then("set_budget", size=size)

    @rule(reduction=st.sampled_from(["sum", "mean"]))
    def set_grad_reduction(self, reduction: str) -> None:
        self.then("set_option", grad_reduction=reduction)

    @precondition(lambda self: can_ring(self.name))
    @rule(ring=st.booleans())
    def set_ring(self, ring: bool) -> None:
        self.then("set_option", ring=ring)

    @rule(on=st.sampled_from(["all", "one"]), how=st.sampled_from(["wrapper", "deepcopy", "pickle", "state_dict"]))
    def make_again(self, on: str, how: str) -> None:
        self.then("make_again", on=on, how=how)

    @rule(data=st.data(), what=st.sampled_from(["setting", "option", "argument", "hook"]))
    def differ(self, data: st.DataObject, what: str) -> None:
        if what in ("setting", "hook") and self.loss.third_party:
            what = "option"  # what it was made with is its own affair; its values are compared a call later
        self.then("differ", batch=self.batch(data), what=what)

    def teardown(self) -> None:
        if not getattr(self, "program", None):
            return
        if self.loss.third_party:  # seconds in a fresh process, which are no hang
            self.worlds.run(self.world_size, self.loss.make, timeout=120)
        try:
            refusals = self.worlds.run(self.world_size, play, self.name, self.thresholds, self.program, timeout=TIMEOUT)
        except RankError as error:
            self.worlds.close()  # a group that failed stays so, and would fail any other program
            type(self).worlds = Worlds()
            raise AssertionError(self.told(str(error))) from None
        if any(said != refusals[0] for said in refusals):
            raise AssertionError(self.told(f"ranks refuse a call with different words: {refusals}"))
        Training.steps += len(self.program)

    def told(self, what: str) -> str:
        lines = [f"  {action}({', '.join(f'{k}={x!r}' for k, x in a.items())})" for action, a in self.program]
        return "\n".join([f"{self.name}, W={self.world_size}, {self.thresholds}:", *lines, what])


@pytest.fixture
def training() -> Iterator[type[Training]]:
    class OnItsOwnPool(Training):
        worlds = Worlds()

    Training.steps = 0
    OnItsOwnPool.worlds.start(2, 3)
    yield OnItsOwnPool
    OnItsOwnPool.worlds.close()


def quietly(**more: Any) -> settings:
    return settings(deadline=None, suppress_health_check=list(HealthCheck), **more)


def test_a_random_training_is_that_of_one_process(training: type[Training], capsys: pytest.CaptureFixture[str]) -> None:
    if not EVERY_CASE:
        run_state_machine_as_test(training, settings=quietly(max_examples=25, stateful_step_count=8))
        return
    while Training.steps < STEPS:
        run_state_machine_as_test(training, settings=quietly(max_examples=50, stateful_step_count=20, database=None))
        with capsys.disabled():
            print(f"\n{Training.steps} of {STEPS} steps", end="", flush=True)


def test_every_loss_that_can_ring_is_here() -> None:
    of_catalogue = {
        type(loss) for loss in (entry.make() for entry in CATALOGUE.values()) if loss.ring_problem() is None
    }
    made = [LOSSES[name].make() for name in LOSSES if can_ring(name)]
    missing = {x for x in of_catalogue if not any(isinstance(loss, x) for loss in made)}
    assert not missing, f"{missing}: add them to LOSSES in tests.stateful_rank.py, with what they are called with"


def steps(**more: Any) -> list[Action]:
    shards = [(3, 2), (0, 4), (4, 0), (1, 1), (5, 2)]
    return [("step", {"batches": [(sizes, 10 * seed)], **more}) for seed, sizes in enumerate(shards)]


@pytest.mark.parametrize(("number", "name"), list(enumerate(LOSSES)), ids=list(LOSSES))
def test_steps_of_every_loss_are_those_of_one_process(number: int, name: str, worlds: Worlds) -> None:
    """What the search begins with, so that what it finds is a matter of several actions: small batches and shared work."""
    worlds.run(2, LOSSES[name].make)
    reentrant = None if LOSSES[name].remembers else number % 4 == 0
    halves = [steps(), [("set_option", {"grad_reduction": "sum"}), *steps(reentrant=reentrant)]]
    whole = [*halves[0], *halves[1]]
    of_sizes = {"small": whole if EVERY_CASE else halves[number % 2], "shared": whole}
    for size, thresholds in (("small", {}), ("shared", {key: values[1] for key, values in THRESHOLDS.items()})):
        assert worlds.run(2, play, name, thresholds, of_sizes[size], timeout=TIMEOUT) == [[], []]


@pytest.mark.parametrize("how", ["wrapper", "deepcopy", "pickle", "state_dict"])
def test_one_rank_makes_its_wrapper_again_in_mid_training(how: str, worlds: Worlds) -> None:
    program = [*steps(), ("make_again", {"on": "one", "how": how}), *steps()]
    assert worlds.run(2, play, "Clip", {}, program, timeout=TIMEOUT) == [[], []]


def test_a_ring_of_a_group_that_leaves_a_rank_out(worlds: Worlds) -> None:
    program = [("set_option", {"ring": True}), *(("step", {"batches": [x], "wrapper": "subgroup"}) for x in GROUPED)]
    for name in ("NTXent", "SigLIP", "Clip"):
        assert worlds.run(3, play, name, {key: values[1] for key, values in THRESHOLDS.items()}, program) == [[]] * 3


GROUPED = [((2, 4, 3), 0), ((0, 1, 5), 10)]
OF_A_HOOK: list[Action] = [("set_hook", {"on": True}), ("step", {"batches": [((3, 3), 10), ((5, 1), 11)]})]


@pytest.mark.parametrize("name", ["MNRL", "WeightedSum of MNRL"])
def test_indices_of_rows_are_those_of_all_ranks_where_a_loss_has_a_hook(name: str, worlds: Worlds) -> None:
    worlds.run(2, play, name, {}, OF_A_HOOK, timeout=TIMEOUT)


def test_local_indices_among_the_rows_of_all_ranks_are_caught(worlds: Worlds) -> None:
    with pytest.raises(RankError, match="value: error"):
        worlds.run(2, _without_shift, "MNRL", {}, OF_A_HOOK, timeout=TIMEOUT)


def _as_they_came(arguments: Arguments, agreed: Any, world: Any, indices: Any) -> dict[str, Any]:
    return _GATHERED(arguments, agreed, world)


_GATHERED = Arguments.gathered


def _without_shift(name: str, thresholds: dict[str, int], program: list[Action]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arguments, "gathered", _as_they_came)
        return play(name, thresholds, program)


def _owner_of_another_rank() -> str:
    import contrastive_zoo as cz

    loss = cz.MNRL()
    loss.register_forward_hook(lambda module, args, value: value)
    rows = [torch.randn(2, 4) for _ in range(3)]
    with pytest.raises(ValueError, match="owners are rows of this rank's 2") as caught:
        cz.DistributedLoss(loss)(*rows, torch.tensor([0, 2 if dist.get_rank() else 1]))
    with pytest.raises(ValueError, match="indices of local rows do not allow"):
        cz.DistributedLoss(cz.WeightedSum([loss]))(*rows, torch.tensor([0, 1]))
    return str(caught.value)


def test_an_index_beyond_the_local_rows_is_refused_where_a_loss_has_a_hook(worlds: Worlds) -> None:
    assert len(set(worlds.run(2, _owner_of_another_rank, timeout=TIMEOUT))) == 1
