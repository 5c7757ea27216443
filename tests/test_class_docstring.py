"""help() of a loss says what its function computes, what the constructor takes, and what a call refuses."""

import inspect
import pydoc

import pytest

import contrastive_zoo as cz
from contrastive_zoo.loss_base.loss import Loss

CLASSES = [x for x in (getattr(cz, name) for name in cz.__all__) if "function" in getattr(x, "__dict__", ())]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_the_docstring_of_a_class_is_complete(cls: type[Loss]) -> None:
    doc, function = inspect.getdoc(cls), inspect.getdoc(cls.function)
    before_args = function.partition("\n\nArgs:")[0]
    assert doc.startswith(before_args), "summary and formula are the function's"
    assert "Called as ``loss(" in doc
    args = doc.partition("\nArgs:")[2].partition("\nRaises:")[0]
    for name in inspect.signature(cls).parameters:
        assert f"\n    {name}: " in args
    assert "world: " not in doc, "DistributedLoss passes it"
    assert "\nRaises:\n    ValueError: " in doc
    example = doc.partition("\nExamples:")[2].partition("\nSource:")[0]
    assert f"{cls.__name__}(" in example
    assert doc.partition("\nSource:")[2] == function.partition("\nSource:")[2] != ""


def test_all_losses_of_a_function_are_looked_at() -> None:
    assert len(CLASSES) >= 32


def test_help_shows_formula_arguments_and_errors() -> None:
    text = pydoc.plain(pydoc.render_doc(cz.NTXent))
    for part in ("Σ_{k≠i} exp(z_i·z_k / t)", "temperature: t > 0", "ValueError: fewer than two views", "temperature:"):
        assert part in text


def test_a_class_whose_function_says_nothing_keeps_its_own_words() -> None:
    def silent(x, *, times=1.0, world=None): ...

    class Silent(Loss, function=silent):
        """Mine."""

    assert Silent.__doc__ == "Mine."


def test_a_subclass_says_what_it_says() -> None:
    class Cold(cz.NTXent):
        """NT-Xent at a low temperature."""

    assert Cold.__doc__ == "NT-Xent at a low temperature."
