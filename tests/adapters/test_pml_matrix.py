"""All of pytorch-metric-learning on several processes is what it is on one; a cheap form of the table in the docs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import contrastive_zoo as cz
from contrastive_zoo.testing.worlds import Worlds

pytest.importorskip("pytorch_metric_learning")

from pytorch_metric_learning import distances, losses, miners, reducers, regularizers

from tests.helpers import EVERY_CASE
from tools.pml_matrix import measurement
from tools.pml_matrix.cases import AROUND_ANOTHER, Case, all_splits, cases, some_splits
from tools.pml_matrix.constructors import BASES, parts
from tools.pml_matrix.measurement import Row, measure
from tools.pml_matrix.page import page

PAGE = Path(__file__).parents[2] / "docs" / "pages" / "pytorch-metric-learning.md"
MODULES = (losses, miners, reducers, distances, regularizers)


WHOLE = {"TripletMarginLoss", "NTXentLoss", "ArcFaceLoss", "MarginLoss", *AROUND_ANOTHER}


def drawn(case: Case) -> bool:
    """Whether a case is tested: each loss by itself, all of a few losses, and an eighth of the other combinations."""
    return EVERY_CASE or case == Case(case.loss) or case.loss in WHOLE or crc32(str(case).encode()) % 8 == 0


@pytest.fixture(scope="module")
def rows(worlds: Worlds) -> list[Row]:
    return measure(worlds, filter(drawn, cases()), some_splits)


def test_all_cases_equal_one_process(rows: list[Row]) -> None:
    assert [f"{row.case}: {row.wrong}" for row in rows if row.wrong] == []


@pytest.mark.parametrize("loss", parts(losses))
def test_every_exported_loss_is_compared_by_itself_on_every_split(loss: str, rows: list[Row]) -> None:
    (row,) = [row for row in rows if row.case == Case(loss)]
    assert row.unsupported is None, "how is it built? say so in BUILT, or in BASES that it is no loss"
    assert set(row.verdicts) == set(all_splits(row.case))
    assert {len(shards) for shards in row.verdicts} == {1, 2, 3}
    assert any(min(shards) == 0 for shards in row.verdicts)


@pytest.mark.filterwarnings("ignore")  # the library's own, about how it calls torch and NumPy
@pytest.mark.parametrize("loss", parts(losses))
def test_every_loss_has_a_comparison(loss: str) -> None:
    found = measurement.on_one_process(Case(loss)).tensors
    assert found["value 0 of step 0"].abs() > 1e-6
    assert all(x.abs().max() > 1e-9 for name, x in found.items() if name.startswith(("encoder", "parameter")))


def test_every_exported_part_is_compared_with_some_loss(rows: list[Row]) -> None:
    compared = [row.case for row in rows if row.unsupported is None]
    with_miner = {case.miner for case in compared}
    with_part = {name for case in compared for _, name in case.parts}
    assert with_miner - {None} == set(parts(miners))
    inside = {*losses.CrossBatchMemory.supported_losses(), *losses.SelfSupervisedLoss.supported_losses()}
    assert with_part == {name for module in MODULES[2:] for name in parts(module)} | inside
    assert {case.loss for case in compared if case.references} >= {"TripletMarginLoss", "NTXentLoss"}
    assert {case.loss for case in compared if case.mined == "outside"} >= {"TripletMarginLoss", "ArcFaceLoss"}


@pytest.mark.parametrize("references", [False, True], ids=["rows", "reference rows"])
def test_every_miner_by_itself(references: bool, worlds: Worlds) -> None:
    of = [Case("TripletMarginLoss", miner, "outside", references) for miner in parts(miners)]
    rows = measure(worlds, of, lambda _: [(4, 8), (5, 0, 7)])
    assert [(row.case.miner, row.unsupported, row.wrong) for row in rows if row.wrong or row.unsupported] == []


def test_base_classes_that_are_left_out_are_exported() -> None:
    assert set(BASES) <= {name for module in MODULES for name in vars(module)}


def test_a_new_export_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    class NewLoss(losses.ContrastiveLoss):
        def __init__(self, needs_to_be_told: int) -> None:
            super().__init__()

    monkeypatch.setattr(losses, "NewLoss", NewLoss, raising=False)
    assert "NewLoss" in parts(losses)
    assert "needs_to_be_told" in (measurement.on_one_process(Case("NewLoss")).error or "")


def test_the_page_shows_what_was_measured() -> None:
    rows = [Row(case, None, {(1, 2): None}) for case in cases()]
    wrong = Row(rows[0].case, None, {(1, 2): "rank 0: encoder differs by 1.0e+00"})
    text = page([wrong, *rows[1:]])
    line = next(line for line in text.splitlines() if line.startswith(f"| {wrong.case.loss} |"))
    assert line.split(" | ")[1] == "✗<sup>1</sup>"
    assert "1. [1, 2]: rank 0: encoder differs by 1.0e+00" in text
    assert all(f"| {loss} | " in text for loss in parts(losses))
    assert all(f"- `{name}`: {why}." in text for name, why in BASES.items())


# ------------------------------------------------------------------------------------------------------------- mutants


class ByHand(nn.Module):
    """A model of DistributedLoss for even shards and a trainer that averages; its mutants make mistakes."""

    def __init__(self, loss: nn.Module, miner: Any = None, **settings: Any) -> None:
        super().__init__()
        self.loss, self.miner = loss, miner

    def gathered(self, rows: Tensor) -> Tensor:
        return cz.collectives.all_gather(rows, gradient="partial")

    def forward(self, **rows: Tensor) -> Any:
        rows = {name: self.gathered(x) for name, x in rows.items()}
        indices = () if self.miner is None else (self.miner(*rows.values()),)
        return self.loss(*rows.values(), *indices)


def even(_: Case) -> list[tuple[int, ...]]:
    return [(6, 6), (4, 4, 4)]


class TimesW(ByHand):
    def forward(self, **rows: Tensor) -> Any:
        return dist.get_world_size() * super().forward(**rows)


class OwnSlice(ByHand):
    def gathered(self, rows: Tensor) -> Tensor:
        return cz.collectives.all_gather(rows, gradient="complete")


class OwnRowsFirst(ByHand):
    def gathered(self, rows: Tensor) -> Tensor:
        sizes = [None] * dist.get_world_size()
        dist.all_gather_object(sizes, len(rows))
        parts = list(super().gathered(rows).split(sizes))
        return torch.cat([parts.pop(dist.get_rank()), *parts])


class OwnChance(ByHand):
    """The gather is right, but miners draw from each rank's own generator."""


@pytest.mark.parametrize(
    ("mutant", "case"),
    [
        (TimesW, Case("ContrastiveLoss")),
        (TimesW, Case("ProxyAnchorLoss")),
        (OwnSlice, Case("NTXentLoss")),
        (OwnRowsFirst, Case("TripletMarginLoss", "EmbeddingsAlreadyPackagedAsTriplets")),
        (OwnRowsFirst, Case("CrossBatchMemory")),
        (OwnChance, Case("TripletMarginLoss", "UniformHistogramMiner")),
    ],
    ids=str,
)
def test_mutants_are_caught(mutant: Callable[..., Any], case: Case, worlds: Worlds) -> None:
    (row,) = measure(worlds, [case], even, mutant)
    assert row.wrong


def test_the_model_without_a_mutant_is_right(worlds: Worlds) -> None:
    of = map(Case, ("ContrastiveLoss", "ProxyAnchorLoss", "NTXentLoss", "CrossBatchMemory"))
    assert [row.wrong for row in measure(worlds, of, even, ByHand)] == [{}] * 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # how the library calls NumPy
def test_ddp_may_hold_weights_outside_or_inside(worlds: Worlds) -> None:
    def outside(loss: nn.Module, **settings: Any) -> nn.Module:
        return DistributedDataParallel(cz.DistributedLoss(loss, **settings))

    def inside(loss: nn.Module, **settings: Any) -> nn.Module:
        return cz.DistributedLoss(DistributedDataParallel(loss), **settings)

    with_weights = [case for case in map(Case, parts(losses)) if [*case.construct()[0].parameters()]]
    assert len(with_weights) > 10
    for wrap in (outside, inside):
        rows = measure(worlds, with_weights, lambda _: [(4, 8), (12, 0)], wrap)
        assert {row.case.loss: row.wrong for row in rows if row.wrong} == {}


def test_the_page_in_the_docs_is_of_all_losses_and_finds_nothing_different() -> None:
    table = PAGE.read_text(encoding="utf-8").split("<!-- matrix: begin -->")[1].split("<!-- matrix: end -->")[0]
    assert [loss for loss in parts(losses) if f"\n| {loss} | ✓" not in table] == []
    assert [line for line in table.splitlines() if line.startswith("|") and "✗" in line] == []
    for shards in all_splits(Case("NTXentLoss")):
        assert f"| {len(shards)} | {list(shards)} | " in table
