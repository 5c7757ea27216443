"""All of pytorch-metric-learning on several processes is what it is on one; a cheap form of the table in the docs."""

from collections.abc import Mapping, Sequence
from zlib import crc32

import pytest
import torch
from pytorch_metric_learning import losses, miners
from torch import Tensor

from contrastive_zoo.testing.worlds import Worlds
from tests.adapters.test_peer_losses import times_size
from tests.helpers import EVERY_CASE
from tools.comparison import Batch, Compared, Run, measure, train
from tools.pml_matrix import BASES, SPLITS, Case, all_runs, cases, parts, some_runs

pytestmark = pytest.mark.peers

Rows = Sequence[tuple[Case, Mapping[Run, Compared]]]
WHOLE = {"TripletMarginLoss", "ProxyAnchorLoss"}


def drawn(case: Case) -> bool:
    """Whether a case is tested: each loss by itself and inside another, all of two, and a sixteenth of the others."""
    return EVERY_CASE or case.miner is None or case.loss in WHOLE or crc32(str(case).encode()) % 16 == 0


def verdict(case: Case, compared: Mapping[Run, Compared]) -> tuple[str, str]:
    """Return "✗" and what differs, "–" and why the library has no such case on one process, or "✓"."""
    for run, of in compared.items():
        if wrong := of.wrong(case.tolerance):
            return "✗", f"{case}, shards {list(run.steps[0])}: {wrong}"
    unsupported = case.inapplicable or next((x.unsupported for x in compared.values() if x.unsupported), None)
    return ("✓", "") if unsupported is None else ("–", " ".join(unsupported.split())[:160])


def wrong(rows: Rows) -> list[str]:
    return [why for mark, why in (verdict(*row) for row in rows) if mark == "✗"]


@pytest.fixture(scope="module")
def rows(worlds: Worlds) -> Rows:
    return measure(worlds, filter(drawn, cases()), all_runs if EVERY_CASE else some_runs)


def test_all_cases_equal_one_process(rows: Rows) -> None:
    assert wrong(rows) == []


def test_every_export_is_compared(rows: Rows) -> None:
    """Every loss by itself, every part with some loss; in a search on every split."""
    marks = {case: verdict(case, compared)[0] for case, compared in rows}
    for loss in parts(losses):
        assert marks[Case(loss)] == "✓", f"how is {loss} built? say so in BUILT, or in BASES that it is no loss"
        assert [run.steps[0] for run in all_runs(Case(loss))] == list(SPLITS)
    compared = [case for case, mark in marks.items() if mark == "✓"]
    assert {case.miner for case in compared} - {None} == set(parts(miners))
    inside = {*losses.CrossBatchMemory.supported_losses(), *losses.SelfSupervisedLoss.supported_losses()}
    assert {case.inner for case in compared} - {None} == inside
    assert {case.loss for case in compared if case.references} >= {"TripletMarginLoss", "NTXentLoss"}
    assert {case.loss for case in compared if case.mined == "outside"} >= {"TripletMarginLoss", "ProxyAnchorLoss"}
    assert set(BASES) <= {*vars(losses), *vars(miners)}


@pytest.mark.filterwarnings("ignore")  # the library's own, about how it calls torch and NumPy
@pytest.mark.parametrize("loss", parts(losses))
def test_every_loss_has_a_comparison(loss: str) -> None:
    found = train(Case(loss), all_runs(Case(loss))[0])
    assert found["value 0"].abs() > 1e-6
    assert all(x.abs().max() > 1e-9 for name, x in found.items() if name.startswith(("encoder", "parameter")))


class Masked(Case):
    def arguments(self, batch: Batch) -> dict[str, Tensor]:
        return super().arguments(batch) | {"enqueue_mask": batch.local(torch.arange(batch.total) % 3 > 0)}


def test_the_enqueue_mask_is_gathered(worlds: Worlds) -> None:
    assert wrong(measure(worlds, [Masked("CrossBatchMemory")], all_runs)) == []


def test_a_new_export_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    class NewLoss(losses.ContrastiveLoss):
        def __init__(self, needs_to_be_told: int) -> None:
            super().__init__()

    monkeypatch.setattr(losses, "NewLoss", NewLoss, raising=False)
    assert "NewLoss" in parts(losses)
    assert "needs_to_be_told" in train(Case("NewLoss"), Run(((12,),)))


def test_a_wrapper_that_counts_w_times_is_caught(worlds: Worlds) -> None:
    """A loss without a wrapper is caught in tests/adapters/test_peer_losses.py."""
    for case in (Case("ContrastiveLoss"), Case("ProxyAnchorLoss"), Case("CrossBatchMemory")):
        assert wrong(measure(worlds, [case], some_runs, times_size)), case
