"""Render the formulas of docstrings as MathML, which browsers draw without a script or a font from elsewhere.

A formula is Unicode text: ``loss_i = log Σ_{k≠i} exp(z_i·z_k / t)``. A script after ``_`` or ``^`` is a run of letters and
digits or a group in braces; a run of one or two letters is a run of indices. It becomes LaTeX, which latex2mathml renders.
"""

import re

_SUPERSCRIPTS = str.maketrans("⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹ᵀ'", "+-0123456789T′")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_NAMED = {
    "‖": r"\|", "Σ": r"\sum", "∫": r"\int", "−": "-", "·": r"\cdot", "<": r"\lt", ">": r"\gt", "≤": r"\le", "≥": r"\ge",
    "≠": r"\ne", "∈": r"\in", "∉": r"\notin", "∪": r"\cup", "≈": r"\approx", "{": r"\{", "max": r"\max", "min": r"\min",
    "mean": r"\operatorname*{mean}", "ẑ": r"\hat{z}", "bR": "bR", "dt": "dt", "ab": "ab",
}  # fmt: skip
"""Signs and words that LaTeX has by name, and products of two variables, which are no words."""

_TOKEN = re.compile(
    r"""(?P<space>\s+)
      | (?P<quoted>"[^"]*")
      | (?P<word>[A-Za-z]+'s\b|(?!mean_)[a-z]{3,}(?:_[a-z]{2,})+|[A-Za-z]+|[α-ωΓΔΛΦΨΩẑ]|\d+(?:\.\d+)?|[½∞])
      | (?P<group>[_^]\{)
      | (?P<run>[_^]−?[A-Za-zα-ω0-9]+)
      | (?P<above>[⁺⁻⁰¹²³⁴-⁹ᵀ']+)
      | (?P<below>[₀-₉]+)
      | (?P<open>[(\[{])
      | (?P<close>[)\]}])
      | (?P<sign>[|‖Σ∫√])
      | (?P<operator>[,:=+−·/<>≤≥≠∈∉∪≈])
    """,
    re.VERBOSE,
)
_SPACED = tuple(")]},:=+−·/<>≤≥≠∈∉∪≈")


def _word(text: str) -> str:
    if text in _NAMED or len(text) == 1 or text[0].isdigit():
        return _NAMED.get(text, text)
    return rf"\mathrm{{{text}}}" if text.isalpha() else rf"\text{{{text}}}"


def _run(text: str) -> str:
    sign, name = ("-", text[1:]) if text[0] == "−" else ("", text)
    return sign + (_word(name) if len(name) > 2 else name)


def latex(formula: str) -> str:
    r"""Return one line of a formula in LaTeX.

    Raises:
        ValueError: a piece is not in the notation, or its brackets do not match.

    Examples:
        >>> latex("Σ_{k≠i} s_ik²")
        '\\sum _{ k \\ne i } \\  s _{ik} ^{2}'
    """
    parts: list[str] = []
    closing: list[tuple[str, str]] = []  # the brackets that are open: how each ends in the formula, and in LaTeX
    at, before = 0, "space"
    while match := _TOKEN.match(formula, at):
        kind, text, at = str(match.lastgroup), match[0], match.end()
        if kind in ("group", "run", "above", "below") and before == "space":
            raise ValueError(f"{text!r} in the formula {formula!r} follows nothing")
        if kind == "space":
            is_spaced = before in ("operator", "open", "group") or formula[at : at + 1] in _SPACED  # by LaTeX
            parts += [] if is_spaced else [r"\quad" if len(text) > 1 else "\\ "]
        elif kind == "quoted":
            parts.append(rf"\text{{{text}}}")
        elif kind == "word":
            parts.append(_word(text))
        elif kind == "run":
            parts.append(f"{text[0]}{{{_run(text[1:])}}}")
        elif kind in ("above", "below"):
            mark, table = ("^", _SUPERSCRIPTS) if kind == "above" else ("_", _SUBSCRIPTS)
            parts.append(f"{mark}{{{text.translate(table)}}}")
        elif kind in ("group", "open"):
            end = _CLOSING[text[-1]]
            closing.append((end, rf"\{end}" if text == "{" else end))
            parts.append(_NAMED.get(text, text))
        elif kind == "close":
            expected, written = closing.pop() if closing else ("", "")
            if text != expected:
                raise ValueError(f"the brackets of the formula {formula!r} do not match")
            parts.append(written)
        else:
            parts.append(_NAMED.get(text, text))
        before = kind
    if at < len(formula):
        raise ValueError(f"{formula[at]!r} at position {at} of the formula {formula!r} is not in the notation")
    if closing:
        raise ValueError(f"the brackets of the formula {formula!r} do not match")
    return " ".join(parts)


def mathml(formula: str) -> str:
    """Return a formula as HTML, one paragraph per line; a line that begins with a space continues the one above.

    ValueError as for :func:`latex`.
    """
    from latex2mathml.converter import convert

    lines = re.sub(r"\n +", "  ", formula).split("\n")
    shown = (
        str(convert(latex(line), display="block")).replace('display="block"', 'displaystyle="true"') for line in lines
    )
    return f'<div class="formula">{"".join(f"<p>{x}</p>" for x in shown)}</div>'
