"""The table of the zoo: every row makes a loss, and the page in the docs is this table's."""

from pathlib import Path

import pytest
import torch

import contrastive_zoo as cz
from contrastive_zoo.catalogue import CATALOGUE, Entry
from contrastive_zoo.loss_base.loss import Loss
from tools.zoo_page import as_markdown

PAGE = Path(__file__).parent.parent / "docs" / "pages" / "zoo.md"
COMPOSED = {"Matryoshka", "WeightedSum", "CrossBatchMemory", "RowLoss", "ClassLoss", "DistributedLoss"}


@pytest.mark.parametrize("entry", CATALOGUE.values(), ids=lambda entry: entry.name)
def test_a_row_makes_a_loss_with_a_formula_and_a_source(entry: Entry) -> None:
    loss = entry.make()
    assert entry.summary.endswith(".")
    assert "http" in entry.source
    assert entry.family
    assert entry.engine
    if entry.call == "views":
        loss(torch.eye(3, requires_grad=True), torch.eye(3, requires_grad=True)).backward()
    elif entry.call == "labels":
        loss(torch.eye(3).repeat(2, 1).requires_grad_(), torch.arange(6) % 3).backward()


def test_every_loss_has_a_row() -> None:
    public = {name: getattr(cz, name) for name in cz.__all__}
    losses = {name for name, found in public.items() if isinstance(found, type) and issubclass(found, Loss)}
    assert losses - {entry.cls for entry in CATALOGUE.values()} <= COMPOSED


def test_the_page_is_of_this_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == as_markdown(), "python -m tools.zoo_page > docs/pages/zoo.md"


def test_there_are_thirty() -> None:
    assert len({entry.cls for entry in CATALOGUE.values()}) >= 30
