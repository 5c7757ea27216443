"""Value, encoder gradient and parameter gradient are those of one process, for every loss and every split."""

import itertools
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import contrastive_zoo as cz
from contrastive_zoo.engine import plan, small_batch
from contrastive_zoo.testing import invariants
from contrastive_zoo.testing.batch import GlobalBatch, global_batches
from contrastive_zoo.testing.invariants import CONTRACT, INVARIANTS, Broken, finite_at_extremes
from contrastive_zoo.testing.measurement import Case, Trial, whole_batch
from contrastive_zoo.testing.worlds import Worlds
from tests.helpers import EVERY_CASE, TEMPERATURES, Pools, drawn, error_message
from tests.losses import zoo_labelled, zoo_softmax
from tests.losses.whole_zoo import EVERY, WHOLE_ZOO
from tests.test_operators import Operators
from tests.zoo import ZOO, BatchHard, Entry, dense_batch_hard, dense_nt_xent
from tools.gallery.recipe import GALLERY

GIVEN = ("MNRL, data sets", "SigLIP, ids", "SigLIP, captions", "SupCon, several labels", "SupCon, mostly shared labels")
"""What these compare is given by arguments of the call, with which there is no ring."""
IN_A_RING = [x for x in WHOLE_ZOO if x.make(temperature=0.3).ring_problem() is None and x.name not in GIVEN]
SOFTMAXES = ZOO + zoo_softmax.ENTRIES + zoo_labelled.ENTRIES
LEARNABLE = [entry for entry in SOFTMAXES if not entry.name.startswith("RowLoss")]


def require_contract(case: Case, batch: GlobalBatch, pools: Pools) -> Trial:
    trial = Trial(case, batch, pools.drawn(case.name, batch))
    for invariant in CONTRACT:
        invariant(trial)
    return trial


@pytest.mark.parametrize("entry", EVERY, ids=str)
@given(
    batch=global_batches(),
    temperature=TEMPERATURES,
    learnt=st.sampled_from([True, False]),  # the first example is learnt
    reduction=st.sampled_from(["mean", "sum"]),
    trainer=st.sampled_from(["mean", "sum"]),
)
def test_the_contract_holds(entry: Entry, batch, temperature, learnt, reduction, trainer, pools: Pools) -> None:
    assume(batch.d > 1 or temperature > 0.05)  # unit embeddings of width 1 have rounding for a gradient, divided by t
    learnt = learnt and entry in LEARNABLE

    def make():
        number = cz.LearnableTemperature(temperature) if learnt else temperature
        return cz.DistributedLoss(entry.make(temperature=number, reduction=reduction), grad_reduction=trainer)

    trial = require_contract(replace(entry.case(trainer), make=make), batch, pools)
    assert not learnt or trial.on_one_process().parameters


@pytest.mark.path("users")
def test_one_step_takes_either_path(monkeypatch, pools: Pools) -> None:
    """The mutant writes a rank's gradient to other samples, in small batches of several ranks only."""
    gradient = small_batch._gradient_of_rows

    def misplaced(w, q, k, local_slice, views, count):
        found = gradient(w, q, k, local_slice, views, count)
        return found if local_slice is None else found.roll(1, 0)

    monkeypatch.setattr(small_batch, "_gradient_of_rows", misplaced)
    case = Entry("NTXent", cz.NTXent, dense_nt_xent).case()
    for seed, caught in ((1, pytest.raises(Broken)), (2, nullcontext())):
        with caught:
            invariants.same_encoder_gradient(Trial(case, GlobalBatch((3, 2), d=3, seed=seed), pools.threads))


@pytest.mark.parametrize("entry", IN_A_RING, ids=str)
@given(batch=global_batches(), trainer=st.sampled_from(["mean", "sum"]))
def test_the_contract_holds_in_a_ring(entry: Entry, batch, trainer, pools: Pools) -> None:
    def make():
        return cz.DistributedLoss(entry.make(temperature=0.3), grad_reduction=trainer, ring=True)

    require_contract(replace(entry.case(trainer), make=make), batch, pools)


@pytest.mark.parametrize("entry", ZOO, ids=str)
@given(batch=global_batches(), dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
def test_the_value_of_rows_in_any_dtype_is_that_of_one_process(entry: Entry, batch, dtype, pools: Pools) -> None:
    make, rows = entry.make, [x.to(dtype) if x.is_floating_point() else x for x in whole_batch(entry.case(), batch)]

    def job(*mine):
        return cz.DistributedLoss(make(temperature=0.5))(*mine)

    parts = zip(*(x.split(list(batch.shards)) for x in rows), strict=True)
    expected = make(temperature=0.5)(*rows)
    eps = torch.finfo(expected.dtype).eps
    for found in pools.drawn(entry.name, batch).run(len(batch.shards), job, each=list(parts)):
        assert found.dtype == expected.dtype == (dtype if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(found, expected, rtol=4 * eps, atol=eps)


@pytest.mark.parametrize(
    ("entry", "shards", "trainer"),
    [
        *zip(WHOLE_ZOO, itertools.cycle([(1, 4), (0, 3, 2), (3, 3)]), itertools.cycle(["mean", "sum"]), strict=False),
        *((entry, (0, 3, 2), "sum") for entry in ZOO if EVERY_CASE),
    ],
    ids=str,
)
def test_every_invariant_holds(entry: Entry, shards: tuple[int, ...], trainer, pools: Pools) -> None:
    """Every loss has one invariant that no other test has, every invariant a part of the losses; a search has all."""
    batch = GlobalBatch(shards, d=3, labels="singletons" if shards == (1, 4) else "mixed", seed=5)
    trial = Trial(entry.case(trainer, temperature=0.2), batch, pools.drawn(entry.name, shards))
    further = [x for x in INVARIANTS if x not in (*CONTRACT, finite_at_extremes)]
    first = WHOLE_ZOO.index(entry) // 3 % len(further)
    for invariant in further if EVERY_CASE else [further[first]]:
        invariant(trial)


class NoisyHard(BatchHard):
    def rows(self, similarity, positive, negative):
        losses, valid = super().rows(similarity, positive, negative)
        return losses * torch.rand(()), valid


MANY = [
    *((entry, (0, 2, 0, 1, 3, 0, 0, 1)) for entry in WHOLE_ZOO[:: 1 if EVERY_CASE else 24]),
    *((entry, (*[0] * 9, 4, 0, 1, *[0] * 4, 2)) for entry in WHOLE_ZOO[1 :: 2 if EVERY_CASE else 96]),
    *((entry, (*[0] * 30, 3, *[0] * 31, 1, 2)) for entry in WHOLE_ZOO[4 :: 5 if EVERY_CASE else 96]),
]


@pytest.mark.parametrize(("entry", "shards"), MANY, ids=lambda x: f"W={len(x)}" if isinstance(x, tuple) else str(x))
def test_the_contract_holds_at_every_step_on_many_ranks_of_which_most_are_empty(entry, shards, pools: Pools) -> None:
    trial = Trial(entry.case(temperature=0.3), GlobalBatch(shards, d=2, seed=len(shards)), pools.threads)
    for invariant in (*CONTRACT, invariants.same_at_later_steps) if EVERY_CASE or len(shards) < 64 else CONTRACT:
        invariant(trial)


@pytest.mark.parametrize(("shards", "trainer"), drawn([(1, 4), (0, 3, 2)], ["mean", "sum"], one_in=2), ids=str)
def test_a_loss_that_draws_draws_the_numbers_of_one_process(shards, trainer, pools: Pools) -> None:
    case = Entry("NoisyHard", NoisyHard, dense_batch_hard, call="labels").case(trainer)
    assert invariants.same_random_numbers(Trial(case, GlobalBatch(shards, d=3, seed=5), pools.drawn(shards)))


@pytest.mark.parametrize("entry", WHOLE_ZOO, ids=str)
@settings(max_examples=settings().max_examples // 2)
@given(batch=global_batches(kinds=["duplicates", "collinear", "zeros", "huge", "tiny"]), temperature=TEMPERATURES)
def test_extremes_stay_finite(entry: Entry, batch, temperature, pools: Pools) -> None:
    finite_at_extremes(Trial(entry.case(temperature=temperature), batch, pools.drawn(entry.name, batch)))


@pytest.mark.parametrize(("invariant", "ranks"), drawn(INVARIANTS, ["threads", "processes"], one_in=2), ids=str)
def test_each_invariant_catches_its_mutant(invariant, ranks: str, impatient: Worlds, pools: Pools) -> None:
    case, worlds = GALLERY[invariant.catches].case, impatient if ranks == "processes" else pools.threads
    kind = "huge" if invariant is finite_at_extremes else "gaussian"
    trials = (Trial(case, GlobalBatch(shards, seed=1, kind=kind), worlds) for shards in [(3, 3), (2, 4), (1, 3, 2)])
    assert any(len(error_message(lambda trial=trial: invariant(trial), Broken) or "") > 20 for trial in trials)


@pytest.mark.parametrize(("entry", "few"), drawn(WHOLE_ZOO, [-1, 10**6], one_in=2), ids=str)
def test_a_validation_step_does_no_work_for_gradients(entry: Entry, few, monkeypatch) -> None:
    """Leaves still say that they need a gradient under ``no_grad``."""
    monkeypatch.setattr(plan, "SMALL_MATRIX", few)
    monkeypatch.setattr(plan, "SMALL_PLAIN", few)
    rows = whole_batch(entry.case(), GlobalBatch((6,), d=3, seed=1))

    def operations(*, leaves: bool) -> list[str]:
        torch.manual_seed(0)
        loss = entry.make(temperature=0.3).double().requires_grad_(leaves)
        given = [x.clone().requires_grad_(leaves) if x.is_floating_point() else x for x in rows]
        with torch.no_grad(), Operators() as recorded:
            loss(*given)
        return recorded.names

    assert operations(leaves=True) == operations(leaves=False)
