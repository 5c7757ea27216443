"""The table of the zoo: every row makes a loss, and the page in the docs is this table's."""

import importlib
import inspect
import pydoc
import re
from pathlib import Path

import pytest
import torch

import contrastive_zoo as cz
from contrastive_zoo.loss_base.loss import Loss
from contrastive_zoo.testing.catalogue import CATALOGUE, Entry
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
    missing = losses - {entry.cls for entry in CATALOGUE.values()} - COMPOSED
    assert not missing, f"{missing}: add a row to contrastive_zoo/testing/catalogue.md"


BASES = {"MemoryLoss", "LateInteractionLoss"}
"""Classes of the folder of losses that only others extend."""


def test_every_loss_of_the_package_is_public() -> None:
    for file in (Path(cz.__file__).parent / "losses").glob("[!_]*.py"):
        module = importlib.import_module(f"contrastive_zoo.losses.{file.stem}")
        defined = {name for name, x in vars(module).items() if isinstance(x, type) and issubclass(x, Loss)}
        own = {name for name in defined if getattr(module, name).__module__ == module.__name__ and name[0] != "_"}
        assert own - BASES <= set(cz.__all__), f"add {own} to contrastive_zoo/losses/__init__.py"


@pytest.mark.parametrize("cls", {entry.loss: None for entry in CATALOGUE.values()}, ids=lambda cls: cls.__name__)
def test_the_docstring_says_what_the_constructor_and_a_call_take(cls: type[Loss]) -> None:
    doc = inspect.getdoc(cls) or ""
    example = doc.partition("\nExamples:")[2].partition("\nSource:")[0]
    assert f"{cls.__name__}(" in example
    if "\nSource:" not in doc:  # it has the docstring of the class that it extends
        return
    args = doc.partition("\nArgs:")[2].partition("\nRaises:")[0]
    found = re.findall(r"^    (\w+): ", args, re.MULTILINE)
    named = {name for name, x in cls.fields.items() if x.init}
    of_bases = inspect.getdoc(Loss), inspect.getdoc(cz.ClassLoss)  # which document what several losses have
    shared = {name for doc in of_bases for name in re.findall(r"^    (\w+): ", doc or "", re.MULTILINE)}
    assert set(cls._own_fields) & named - shared <= set(found) <= named
    assert issubclass(cls, cz.RowLoss) or "Called as ``loss(" in doc  # a RowLoss's docstring says how it is called
    assert "world: " not in doc, "DistributedLoss passes it"


def test_help_shows_formula_arguments_and_errors() -> None:
    text = pydoc.plain(pydoc.render_doc(cz.Triplet))
    for part in ("max(0, D_ip − D_in + margin)", "margin: in units of the metric", "ValueError: semi-hard mining with"):
        assert part in text


def test_the_page_is_of_this_table() -> None:
    assert as_markdown() in PAGE.read_text(encoding="utf-8"), "run: python -m tools.zoo_page"
