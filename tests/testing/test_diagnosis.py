"""A diagnosis names known mistakes, the same on every run; a mistake in no table is not recognised."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import contrastive_zoo as cz
from contrastive_zoo.testing.invariants import CONTRACT
from contrastive_zoo.testing.measurement import Call, Case
from contrastive_zoo.testing.mistakes import FACTS, MISTAKES, NOT_RECOGNISED, SIGNATURES, Diagnosis, diagnose
from contrastive_zoo.testing.probes import LossEvidence
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EVERY_CASE
from tools.gallery.recipe import (
    GALLERY,
    DenseInfoNCE,
    Recipe,
    symmetric_cross_entropy,
)

TRIED = [recipe for recipe in GALLERY.values() if recipe.mistake is not None or not recipe.step]
CONTRACT_NAMES = [invariant.name for invariant in CONTRACT]


def size() -> int:
    return torch.distributed.get_world_size()


def rank() -> int:
    return torch.distributed.get_rank()


def diagnosed(case: Case, worlds: Worlds) -> Diagnosis:
    return diagnose(LossEvidence(case, CONTRACT_NAMES, worlds))


def mistake(make: Callable[[], Any], worlds: Worlds, call: Call = "views", **settings: Any) -> str:
    return diagnosed(Case(make, call, **settings), worlds).mistake


def test_mistakes_predict_facts_that_can_be_compared() -> None:
    predicted = {fact for of_stage in SIGNATURES.values() for facts in of_stage.values() for fact in facts}
    with_factor = {
        fact for fact in FACTS if re.search("exactly| times ", fact)
    }  # of every factor, also those of no mistake
    assert predicted <= FACTS.keys()
    assert FACTS.keys() - with_factor <= predicted
    assert {name for of_stage in SIGNATURES.values() for name in of_stage} <= MISTAKES.keys()


# --- recipes of users, which differ from those of the gallery ---------------------------------------------------------


def test_local_anchors_with_offsets_a_gather_with_gradient_and_times_w(impatient: Worlds) -> None:
    def loss(queries, documents):
        scores = F.normalize(queries, dim=1) @ cz.collectives.all_gather(F.normalize(documents, dim=1)).T
        targets = torch.arange(len(queries)) + len(queries) * rank()
        return F.cross_entropy(scores / 0.5, targets) * size()

    assert mistake(lambda: loss, impatient) == "local loss × W"


def test_local_anchors_whose_labels_are_not_gathered(impatient: Worlds) -> None:
    def loss(embeddings, labels):
        z = F.normalize(embeddings, dim=1)
        similarity = z @ cz.collectives.all_gather(z).T
        positive = labels[:, None] == labels.repeat(size())[None, :]
        return (similarity.logsumexp(1) - (similarity * positive).sum(1) / positive.sum(1)).mean()

    assert mistake(lambda: loss, impatient, "labels") == "labels not gathered"


# --- planted mistakes that are in no table ----------------------------------------------------------------------------


def larger_on_several_processes():
    factor = 1.0 if size() == 1 else 1.3
    return lambda view1, view2: factor * cz.DistributedLoss(DenseInfoNCE())(view1, view2)


def without_the_last_sample(view1, view2):
    a, b = (cz.collectives.all_gather(F.normalize(view, dim=1)) for view in (view1, view2))
    n = len(a) - (size() > 1)
    return symmetric_cross_entropy(3.0 * a[:n] @ b[:n].T)


def sharper_on_several_processes(view1, view2):
    a, b = (cz.collectives.all_gather(F.normalize(view, dim=1)) for view in (view1, view2))
    return symmetric_cross_entropy((2.0 + size()) * a @ b.T)


def one_detached_coordinate(view1, view2):
    a, b = (cz.collectives.all_gather(F.normalize(view, dim=1)) for view in (view1, view2))
    a = torch.cat([a[:, :1].detach(), a[:, 1:]], 1) if size() > 1 else a
    return symmetric_cross_entropy(3.0 * a @ b.T)


def with_a_bonus_of_rank():
    bonus = 0.1 * rank()
    return lambda view1, view2: cz.DistributedLoss(DenseInfoNCE())(view1, view2) + bonus * view1.square().sum()


@pytest.mark.parametrize("loss", [without_the_last_sample, sharper_on_several_processes])
def test_a_loss_that_is_right_when_wrapped_gathers_by_itself(loss: Callable[..., Any], impatient: Worlds) -> None:
    assert mistake(lambda: loss, impatient) == "gathers by itself"
    wrapped = LossEvidence(Case(lambda: cz.DistributedLoss(loss), "views"), CONTRACT_NAMES, impatient)
    assert wrapped.stages == []


def test_the_line_is_named_where_ranks_and_one_process_part(impatient: Worlds) -> None:
    found = diagnosed(Case(larger_on_several_processes, "views"), impatient)
    line = larger_on_several_processes.__code__.co_firstlineno + 2
    assert f"first on rank 0 at test_diagnosis.py:{line} in <lambda>: mul" in found.place
    assert all("(not so: " in x for x in found.competing)
    assert found.place in str(found)


@pytest.mark.parametrize("make", [larger_on_several_processes, with_a_bonus_of_rank])
def test_a_mistake_in_no_table_is_not_recognised(make: Callable[[], Any], impatient: Worlds) -> None:
    found = diagnosed(Case(make, "views"), impatient)
    assert found.mistake == NOT_RECOGNISED, str(found)
    assert "on W=2, shards [3, 3]: values ×" in found.measured
    assert "encoder gradient ×" in found.measured
    assert "cosine" in found.measured


def test_a_gradient_of_wrong_direction_is_described_without_a_guess(impatient: Worlds) -> None:
    found = diagnosed(Case(lambda: one_detached_coordinate, "views"), impatient)
    assert found.mistake == "wrong direction"
    assert "or a part of the graph is detached" in found.why


# --- training steps ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not EVERY_CASE, reason="test_check.py diagnoses a recipe of every mistake once")
@pytest.mark.parametrize("recipe", TRIED, ids=lambda recipe: recipe.name)
def test_the_diagnosis_is_the_same_on_every_run(recipe: Recipe, impatient: Worlds) -> None:
    assert len({str(diagnosed(recipe.case, impatient)) for _ in range(5)}) == 1


@pytest.mark.parametrize(
    ("grad_reduction", "trainer", "expected"), [("mean", "sum", "trainer sums"), ("sum", "mean", "trainer averages")]
)
def test_the_trainer_is_told_apart_from_a_loss_outside_of_the_model(
    grad_reduction, trainer, expected, impatient: Worlds
):
    def make():
        loss = cz.DistributedLoss(DenseInfoNCE(), grad_reduction=grad_reduction)
        model = nn.Linear(3, 2)

        def step(model, *views):
            value = loss(*map(model, views))
            value.backward()
            for parameter in model.parameters():
                parameter.grad = cz.collectives.all_reduce(parameter.grad, trainer)
            return value

        return model, step

    assert mistake(make, impatient, step=True) == expected


def test_a_gradient_of_loss_parameters_that_is_scaled_inside_the_model(impatient: Worlds) -> None:
    def make():
        loss = cz.DistributedLoss(DenseInfoNCE())
        model = nn.ModuleDict({"encoder": nn.Linear(3, 2), "loss": loss})

        def step(model, *views):
            value = model["loss"](*map(model["encoder"], views))
            value.backward()
            cz.average_gradients(model)
            for parameter in model["loss"].parameters():
                parameter.grad *= size()
            return value

        return model, step

    assert mistake(make, impatient, step=True) == "parameters scaled"
