"""Every formula of the catalogue is rendered, and no character of it is lost."""

import html
import importlib.util
import re
from pathlib import Path

import pytest

from contrastive_zoo.testing.catalogue import CATALOGUE
from tools.formulas import latex, mathml

_SIGNS = str.maketrans("⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹ᵀ₀₁₂₃₄₅₆₇₈₉·Σ'ẑ", "+−0123456789T0123456789⋅∑′z")


def characters(text: str) -> list[str]:
    """Return the characters of a formula without the notation of scripts, sorted: a script may stand before another."""
    return sorted(re.sub(r"[_^{}\s]", "", text).translate(_SIGNS))


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_formula_is_rendered_whole(name: str) -> None:
    pytest.importorskip("latex2mathml")
    formula = CATALOGUE[name].formula
    assert formula
    shown = html.unescape(re.sub(r"<[^>]+>", "", mathml(formula))).replace("^", "").replace("-", "−")
    assert characters(shown) == characters(formula)


def test_a_page_renders_formulas_of_the_catalogue_alone() -> None:
    pytest.importorskip("latex2mathml")
    spec = importlib.util.spec_from_file_location("hooks", Path(__file__).parent.parent / "docs" / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    block = '<div class="language-text highlight"><pre><span></span><code>{}\n</code></pre></div>'
    formula = html.escape(CATALOGUE["hcl"].formula)
    page = hooks.on_page_content(block.format(formula) + block.format("a = b"))
    assert page == mathml(CATALOGUE["hcl"].formula) + block.format("a = b")


def test_scripts_belong_to_their_letters() -> None:
    assert latex("s_ij") == "s _{ij}"
    assert latex("h⁺_l") == "h ^{+} _{l}"
    assert latex("mean_{i, j∈{a,b}} x_max") == r"\operatorname*{mean} _{ i , j \in \{ a , b \} } \  x _{\max}"


@pytest.mark.parametrize("formula", ["loss = mean_i [ x_i", "loss = x_i )", "loss = ^2", "loss = x @ y"])
def test_what_is_no_formula_is_refused(formula: str) -> None:
    with pytest.raises(ValueError, match="formula"):
        latex(formula)
