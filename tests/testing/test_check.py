"""The check names every mistake of the gallery, accuses no right recipe, and recognises no mistake that is in no table."""

import itertools
import math
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import contrastive_zoo as cz
from contrastive_zoo.testing import check, measurement, messages
from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.check import NotInvariant, Report, call_form, check_world_size_invariance, examine
from contrastive_zoo.testing.invariants import CONTRACT, Broken, same_value, same_value_on_every_rank
from contrastive_zoo.testing.loss_evidence import LossEvidence
from contrastive_zoo.testing.measurement import Case, Trial
from contrastive_zoo.testing.mistakes import FACTS, MISTAKES, NOT_RECOGNISED, SIGNATURES, diagnose, negated
from contrastive_zoo.testing.stacks import Where
from contrastive_zoo.testing.worlds import Worlds, WorldTimeout
from tests.helpers import EVERY_CASE
from tests.testing.known_losses import RIGHT_LOSSES, WRONG_LOSSES, Known, sharded_anchors_in_float32
from tools.gallery.recipe import GALLERY, DenseInfoNCE, Recipe, make, shard_sizes


@pytest.fixture(autouse=True)
def shrink_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "SHRINKING", 0.5)


@pytest.fixture
def shrink_nothing(monkeypatch: pytest.MonkeyPatch, shrink_briefly: None) -> None:
    """The first counterexample is enough, and each further hang would be waited for."""
    monkeypatch.setattr(check, "SHRINKING", 0.0)


RECIPES = list(GALLERY.values())


def drawn_recipes() -> list[Recipe]:
    """Return one recipe of each mistake and the right ones; a search has all, also the one that waits for a time-out."""
    if EVERY_CASE:
        return RECIPES
    of_mistake = {recipe.mistake: recipe for recipe in RECIPES if recipe.mistake is not None}
    wrong = [recipe for recipe in of_mistake.values() if recipe.name != "early return"]
    return wrong + [recipe for recipe in RECIPES if recipe.mistake is None]


@pytest.mark.usefixtures("shrink_nothing")
@pytest.mark.parametrize(
    "recipe",
    [x if i % 4 == 0 else pytest.param(x, marks=pytest.mark.audit) for i, x in enumerate(drawn_recipes())],
    ids=lambda recipe: recipe.name,
)
def test_the_diagnosis_names_the_mistake(recipe: Recipe, impatient: Worlds) -> None:
    report = examine(
        partial(make, recipe.name),
        world_sizes=(2 + len(recipe.name) % 2,),
        call=recipe.call,
        grad_reduction=recipe.grad_reduction,
        max_examples=1 if recipe.mistake == "uneven shards" else 4,  # the first batch is uneven
        worlds=impatient,
        name=recipe.name,
    )
    found = None if report.diagnosis is None else report.diagnosis.mistake
    assert found == recipe.mistake, str(report)
    assert report.ok == (recipe.mistake is None)


def report(loss: Known, worlds: Worlds) -> Report:
    return examine(
        loss.make, world_sizes=(1, 2, 3) if EVERY_CASE else (1, 2), call=loss.call, width=loss.width, worlds=worlds,
        max_examples=30 if EVERY_CASE else 3, name=loss.name,
    )  # fmt: skip


@pytest.mark.audit
@pytest.mark.parametrize("loss", [x for x in RIGHT_LOSSES if EVERY_CASE or not x.searched], ids=str)
def test_a_right_loss_raises_no_alarm(loss: Known, worlds: Worlds) -> None:
    found = report(loss, worlds)
    assert found.ok, str(found)
    assert "same_encoder_gradient" in found.tried
    assert loss.name != "in float32" or found.notes == ["computes in float32"]


@pytest.mark.audit
@pytest.mark.usefixtures("shrink_nothing")
@pytest.mark.parametrize("loss", WRONG_LOSSES, ids=str)
def test_a_mistake_that_is_not_in_the_gallery_is_named(loss: Known, impatient: Worlds) -> None:
    assert loss.mistake not in {recipe.mistake for recipe in RECIPES}
    found = report(loss, impatient)
    assert not found.ok
    assert found.diagnosis.mistake == loss.mistake, str(found)


@pytest.mark.audit
def test_sums_are_rounded_where_embeddings_are_not(worlds: Worlds) -> None:
    # normalised, every embedding is 1 or −1
    batch = GlobalBatch((3, 2, 2), d=1, labels="same", kind="clustered", seed=6)
    trial = Trial(Case(lambda: sharded_anchors_in_float32, "views"), batch, worlds)
    assert trial.with_noise is not None
    assert 0 < trial.with_noise.tolerance < 1e-6
    same_value(trial.with_noise)


@pytest.mark.audit
@pytest.mark.usefixtures("shrink_nothing")
def test_a_wrong_loss_that_draws_or_rounds_is_found(impatient: Worlds) -> None:
    def with_dropout(embeddings, labels):
        return make("ignored grad_output")(F.dropout(embeddings, 0.2), labels)

    def in_float32(view1, view2):
        return (view1.float() - view2.float()).square().mean()

    for loss, broken in ((with_dropout, "scales_with_grad_output"), (in_float32, "same_value")):
        found = examine(lambda loss=loss: loss, world_sizes=(2,), max_examples=3, worlds=impatient)
        assert broken in [str(x.invariant) for x in found.findings]
    assert found.diagnosis.mistake == "local negatives"


@pytest.mark.audit
@pytest.mark.parametrize(
    ("computes", "smallest"),
    [
        (lambda n: min(n) > 1 and sum(n) > 2, {"runs_on_every_split": (2, 3), "same_encoder_gradient": (2, 4)}),
        (lambda n: min(n) > 1, {"runs_on_every_split": (2, 2), "same_encoder_gradient": (2, 4)}),
    ],
    ids=["that one process computes", "that breaks the same invariant"],
)
def test_a_failure_has_a_small_counterexample_the_diagnosis_and_the_fix(computes, smallest, impatient, monkeypatch):
    def loss(view1, view2):
        if not computes(shard_sizes(view1)):
            raise ValueError("too few samples")
        return make("own slice")(view1, view2)

    monkeypatch.setattr(check, "SHRINKING", math.inf)
    with pytest.raises(NotInvariant) as failure:
        check_world_size_invariance(lambda: loss, world_sizes=(2, 3), worlds=impatient, max_examples=5)
    text = str(failure.value)
    assert "was called with 2 view(s); pass call='labels' if that is wrong" in text
    assert "ratio 0.5, cosine 1" in text
    assert "own slice" in text
    assert "Fix: gather with contrastive_zoo.collectives.all_gather" in text
    found = {x.invariant.name: x.batch for x in failure.value.report.findings}
    assert {name: (len(x.shards), x.total) for name, x in found.items()} == smallest
    assert all(eval(repr(batch)) == batch for batch in found.values())


def test_a_first_call_that_takes_long_lets_later_ones_take_as_long(impatient: Worlds, monkeypatch) -> None:
    """By a clock that goes on by 100 s at each look."""
    timeouts: list[float] = []
    monkeypatch.setattr(check, "time", SimpleNamespace(monotonic=itertools.count(0.0, 100.0).__next__))
    monkeypatch.setattr(check.Examination, "survey", lambda self, _: timeouts.append(self.worlds.timeout))
    monkeypatch.setattr(check.Examination, "train", lambda self: None)
    before = impatient.timeout
    assert examine(lambda: cz.DistributedLoss(cz.SupCon()), world_sizes=(1, 2), worlds=impatient).ok
    assert timeouts == [before + 2 * 2 * (100.0 - check.SHORT_CALL)]
    assert impatient.timeout == before


@pytest.mark.parametrize(("collective", "is_right"), [(None, True), ("all_gather", False)])
def test_slow_ranks_get_more_time_and_those_that_hang_do_not(
    collective, is_right, impatient: Worlds, monkeypatch
) -> None:
    """Every first job of several ranks constructs the loss, so that imports count into no batch."""
    run, short, jobs = impatient.run, impatient.timeout, list[tuple[int, str]]()

    def slow(size: int, job: Any, *args: Any, timeout: float | None = None, **more: Any) -> Any:
        jobs.append((size, job.__name__))
        if size > 1 and job is measurement.measure and impatient.timeout == short:
            raise WorldTimeout("no answer", {}, {0: Where(collective, "model.py:1 in <module>")})
        return run(size, job, *args, timeout=timeout, **more)

    monkeypatch.setattr(impatient, "run", slow)
    report = examine(lambda: cz.DistributedLoss(cz.SupCon()), world_sizes=(1, 2, 3), worlds=impatient, max_examples=5)
    assert report.ok is is_right
    assert impatient.timeout == short
    assert [next(job for size, job in jobs if size == of) for of in (1, 2, 3)] == ["_call_form"] * 3


def test_values_are_compared_in_64_bits_and_undefined_ones_are_equal(worlds: Worlds) -> None:
    def slightly_off(z, labels):
        return cz.collectives.all_gather(z).square().sum() * (1 + 1e-9 * torch.distributed.get_rank())

    def undefined(z, labels):
        return z.sum() * (1.0 if torch.distributed.get_world_size() == 1 else math.nan)

    off, trial = (Trial(Case(lambda x=x: x), GlobalBatch((2, 2)), worlds) for x in (slightly_off, undefined))
    with pytest.raises(Broken):
        same_value_on_every_rank(off)
    assert same_value_on_every_rank(trial)
    with pytest.raises(Broken, match=r"^rank 0 returns nan; one process: [^ ]+$"):
        same_value(trial)


X, NARROW = torch.ones(2, 3, dtype=torch.float64), {"dtype": torch.float32}


@pytest.mark.parametrize(
    ("operation", "precision"),
    [
        (lambda: X.half(), torch.float16),
        (lambda: torch.zeros(2, 3, **NARROW).copy_(X), torch.float32),
        (lambda: X.sum(**NARROW), torch.float32),
        (lambda: (X > 0).float() @ X.long().T.float(), torch.float64),
        (lambda: torch.zeros_like(X, **NARROW) + X.new_ones(3, **NARROW), torch.float64),
        (lambda: torch.empty(2, 3, **NARROW).bernoulli_(X) * X, torch.float64),
    ],
)
def test_a_loss_rounds_where_a_wider_number_becomes_a_narrow_one(operation, precision: torch.dtype) -> None:
    with messages.Messages() as recorded:
        operation()
    assert recorded.precision == precision


def test_the_report_in_plain_types_says_what_holds_and_what_was_not_tried(impatient: Worlds) -> None:
    def examined(name: str, world_size: int = 2) -> dict[str, Any]:
        worlds = {"world_sizes": (world_size,), "worlds": impatient}
        return examine(partial(make, name), max_examples=3, **worlds).as_dict()

    wrong, right, one = examined("local negatives"), examined("statistic with gradient"), examined("local negatives", 1)
    assert (wrong["ok"], wrong["diagnosis"]["mistake"]) == (False, "local negatives")
    assert wrong["invariants"]["same_value"]["holds"] is False
    assert wrong["invariants"]["same_value"]["batch"].startswith("GlobalBatch(")
    assert wrong["invariants"]["scales_with_grad_output"] == {"holds": True}
    assert wrong["invariants"]["same_at_later_steps"] == {"holds": None}  # its first step is wrong already
    holds = {name: x["holds"] for name, x in right["invariants"].items()}
    assert holds["runs_on_every_split"] is True
    assert holds["same_parameter_gradient"] is holds["same_state"] is None  # it has no parameters
    assert one["ok"]
    assert {x["holds"] for x in one["invariants"].values()} == {None}


@pytest.mark.parametrize(
    ("made", "settings", "words"),
    [
        (None, {}, "it returned NoneType"),
        (torch.ones(()), {}, "it returned Tensor"),
        (len, {"call": "pairs"}, "call is one of auto, labels, views, got 'pairs'"),
        (len, {"grad_reduction": "max"}, "grad_reduction is one of mean, sum"),
        (len, {"world_sizes": (0, 2)}, "world_sizes are numbers of processes"),
        (lambda x, labels: {}["class"], {"max_examples": 3}, "on one process, so there is no reference .* 'class'"),
        (lambda x, labels: (x * math.nan).sum(), {"max_examples": 3}, "no reference .* not finite at W=2"),
    ],
)
def test_what_cannot_be_checked_is_refused(made: object, settings, words: str, worlds: Worlds) -> None:
    with pytest.raises(ValueError, match=words):
        examine(lambda: made, **{"world_sizes": (2,), "worlds": worlds} | settings)


def test_the_call_form_is_inferred_from_parameter_names() -> None:
    assert call_form(cz.DistributedLoss(cz.SupCon()))[0] == "labels"
    assert call_form(cz.DistributedLoss(cz.NTXent())) == ("views", 2)
    assert call_form(nn.CosineEmbeddingLoss())[0] == "labels"
    assert call_form(lambda z, y: z.sum())[0] == "labels"
    assert call_form(cz.KoLeo()) == ("views", 1)
    assert call_form(nn.TripletMarginLoss()) == ("views", 3)
    assert call_form(lambda a, b, scale=1.0: a.sum()) == ("views", 2)


def sleeping(is_asleep: Callable[[], bool]) -> Callable[[], Any]:
    def loss(view1, view2):
        while is_asleep():
            time.sleep(0.01)
        return (view1 - view2).square().sum()

    return lambda: loss


@pytest.mark.audit
def test_a_loss_that_does_not_return_cannot_be_checked_and_is_no_hang_of_a_collective() -> None:
    with Worlds(timeout=0.5, grace=0.3) as worlds:
        said = r"does not end on one process. W=1: no answer within 5 s. rank 0 is at test_ch"
        with pytest.raises(ValueError, match=said):
            examine(sleeping(lambda: True), world_sizes=(2,), worlds=worlds)
        makes = sleeping(lambda: torch.distributed.get_world_size() > 1)
        evidence = LossEvidence(Case(makes, "views"), [], worlds)
        assert diagnose(evidence).mistake == "no answer"


def test_a_probe_that_one_process_cannot_compute_is_no_failure_of_ranks(impatient: Worlds) -> None:
    def of_four_views(features):
        a, b, c, d = features.view(4, -1, 3)
        return (a * b - c * d).square().sum()

    case = Case(lambda: cz.DistributedLoss(of_four_views), "views", views=1)
    assert diagnose(LossEvidence(case, ["same_value_in_any_order"], impatient)).mistake == "views split wrongly"


def test_mistakes_predict_facts_that_can_be_compared() -> None:
    predicted = {fact for of_stage in SIGNATURES.values() for facts in of_stage.values() for fact in facts}
    with_factor = {fact for fact in FACTS if re.search("exactly| times ", fact)}  # also of factors of no mistake
    assert predicted <= FACTS.keys()
    assert FACTS.keys() - with_factor <= predicted
    assert {name for of_stage in SIGNATURES.values() for name in of_stage} <= MISTAKES.keys()


def test_a_mistake_is_excluded_by_the_opposite_of_what_it_predicts() -> None:
    later = {fact for of_stage in SIGNATURES.values() for facts in of_stage.values() for fact in facts[1:]}
    assert {negated(fact) for fact in later}.isdisjoint(later - {"ranks gather", "ranks reduce"})
    assert {fact: negated(fact) for fact in later} | OPPOSITES == {fact: negated(fact) for fact in later}


OPPOSITES = {
    "the encoder's gradient is 0 times the right one": "the encoder's gradient is not 0",
    "the encoder's gradient is W times the right one": "the encoder's gradient is not W times the right one",
    "no rank communicates in the backward pass": "ranks communicate in the backward pass",
    "ranks gather": "ranks do not gather",
    "a change of other ranks' samples changes nothing": "a change of other ranks' samples changes something",
    "ranks that hold copies of the same samples are wrong": "ranks that hold copies of the same samples are not wrong",
}


@pytest.mark.parametrize(
    "mistake",
    [
        lambda value, view1: (1.0 if torch.distributed.get_world_size() == 1 else 1.3) * value,
        lambda value, view1: value + 0.1 * torch.distributed.get_rank() * view1.square().sum(),
    ],
)
def test_a_mistake_in_no_table_is_not_recognised_but_measured(mistake: Callable[..., Any], impatient: Worlds) -> None:
    def loss(view1, view2):
        return mistake(cz.DistributedLoss(DenseInfoNCE())(view1, view2), view1)

    found = diagnose(LossEvidence(Case(lambda: loss, "views"), [invariant.name for invariant in CONTRACT], impatient))
    assert found.mistake == NOT_RECOGNISED, str(found)
    assert "on W=2, shards [3, 3]: values ×" in found.measured
    assert "encoder gradient ×" in found.measured
    assert "cosine" in found.measured
    assert all(". Excluded: " in x for x in found.competing)


@pytest.mark.audit
@pytest.mark.parametrize(  # found wrong; right within the noise; the mutant
    ("name", "imported"), [("own slice", True), ("sharded anchors", True), ("own slice", False)]
)
@pytest.mark.usefixtures("shrink_nothing")
def test_threads_record_after_the_import_of_the_compiler(name, imported, tmp_path: Path, monkeypatch) -> None:
    """The import would count in the time-out of a rank, which would end it."""
    (tmp_path / "compiler.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(check, "COMPILER", "compiler" if imported else "json")
    found: list[bool] = []

    enter = messages.Messages.__enter__
    recording = lambda self: found.append("compiler" in sys.modules) or enter(self)  # noqa: E731 - a patch
    monkeypatch.setattr(messages.Messages, "__enter__", recording)

    def in_float32(view1, view2):
        return make(name)(view1.float(), view2.float())

    examine(lambda: in_float32, call="views", world_sizes=(2,), max_examples=1, threads=True)
    sys.modules.pop("compiler", None)
    assert found
    assert all(found) is imported
