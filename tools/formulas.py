"""Render the formulas of docstrings as MathML, which browsers draw without a script or a font from elsewhere.

A formula is Unicode text: ``loss_i = log Σ_{k≠i} exp(z_i·z_k / t)``. A script after ``_`` or ``^`` is a run of letters and
digits or a group in braces; a run of one or two letters is a run of indices.
"""

import re
from html import escape
from typing import NamedTuple

_SUPERSCRIPTS = dict(zip("⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹ᵀ'", "+−0123456789T′", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_WITH_LIMITS = ("max", "min", "mean", "Σ")
_PRODUCTS = ("bR", "dt", "ab")
_MEDIUM, _THIN, _WIDE = "0.22em", "0.05em", "1.5em"

_TOKEN = re.compile(
    r"""(?P<space>\s+)
      | (?P<quoted>"[^"]*")
      | (?P<word>[A-Za-z]+'s\b|(?!mean_)[a-z]{3,}(?:_[a-z]{2,})+|[A-Za-z]+|[α-ωΓΔΛΦΨΩẑ]|\d+(?:\.\d+)?|[½∞])
      | (?P<script>[_^](?:\{|−?[A-Za-zα-ω0-9]+)|[⁺⁻⁰¹²³⁴-⁹ᵀ']+|[₀-₉]+)
      | (?P<open>[(\[{])
      | (?P<close>[)\]}])
      | (?P<fence>[|‖])
      | (?P<big>[Σ∫√])
      | (?P<comma>[,:])
      | (?P<operator>[=+−·/<>≤≥≠∈∉∪≈])
    """,
    re.VERBOSE,
)


_MAY_WRAP = re.compile(r" {5,}(?!=| )|  (?=[+−=]  )")


class Token(NamedTuple):
    """A piece of a formula, and whether a space stands before it."""

    kind: str
    text: str
    spaced: bool


def tokens(formula: str) -> list[Token]:
    found: list[Token] = []
    at = 0
    while at < len(formula):
        match = _TOKEN.match(formula, at)
        if match is None:
            raise ValueError(f"{formula[at]!r} at position {at} of the formula {formula!r} is not in the notation")
        spaced = bool(found) and found[-1].kind == "space"
        found.append(Token(str(match.lastgroup), match[0], spaced))
        at = match.end()
    return found


def _word(text: str) -> str:
    if text == "ẑ":  # the letter with its accent has no italic form
        return "<mover accent='true'><mi>z</mi><mo stretchy='false'>^</mo></mover>"
    if text.isalpha() and len(text) > 1 and text not in _PRODUCTS:
        return f"<mi>{text}</mi>"
    if len(text) > 1 and not text[0].isdigit() and text not in _PRODUCTS:
        return f"<mtext>{escape(text)}</mtext>"
    return "".join(f"<mi>{x}</mi>" for x in text) if text.isalpha() else f"<mn>{text}</mn>"


def _indices(text: str) -> str:
    """Return a script without braces: indices of one letter each, or a word."""
    sign = "<mo form='prefix'>−</mo>" if text.startswith("−") else ""
    text = text.removeprefix("−")
    if len(text) > 2:
        return f"<mrow>{sign}{_word(text)}</mrow>"
    return f"<mrow>{sign}{''.join(_word(x) for x in text)}</mrow>"


class _Parser:
    """A recursive descent through the tokens of one line."""

    def __init__(self, formula: str) -> None:
        self.formula = formula
        self.tokens = tokens(formula)
        self.at = 0

    def row(self, closing: str = "") -> str:
        """Return everything up to the closing bracket, or to the end, in one row."""
        parts: list[str] = []
        before = "operator"
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            self.at += 1
            if token.kind == "close":
                if token.text != closing:
                    break
                return f"<mrow>{''.join(parts)}</mrow>"
            if token.kind == "space":
                parts.append(self._space(token, before))
                continue
            parts.append(self._operator(token, before) if token.kind == "operator" else self._with_scripts(token))
            before = "group" if token.kind == "open" else token.kind
        else:
            if not closing:
                return f"<mrow>{''.join(parts)}</mrow>"
        raise ValueError(f"the brackets of the formula {self.formula!r} do not match")

    def _space(self, token: Token, before: str) -> str:
        after = self.tokens[self.at].kind if self.at < len(self.tokens) else "close"
        if "operator" in (before, after) or before == "open" or after in ("close", "comma"):
            return ""
        return f"<mspace width='{_WIDE if len(token.text) > 1 else _MEDIUM}'></mspace>"

    def _operator(self, token: Token, before: str) -> str:
        text = escape(token.text).replace("·", "⋅")
        if token.text in "+−" and before in ("operator", "comma"):
            space = _MEDIUM if self.at < len(self.tokens) and self.tokens[self.at].kind == "space" else _THIN
            return f"<mo form='prefix' lspace='0' rspace='{space}'>{text}</mo>"
        width = _MEDIUM if token.spaced else _THIN
        return f"<mo lspace='{width}' rspace='{width}' stretchy='false'>{text}</mo>"

    def _with_scripts(self, token: Token) -> str:
        base = self._base(token)
        below, above = "", ""
        while self.at < len(self.tokens) and self.tokens[self.at].kind == "script":
            text = self.tokens[self.at].text
            self.at += 1
            if text[0] in _SUPERSCRIPTS:
                above += "".join(_superscript(x) for x in text)
            elif text[0] in _SUBSCRIPTS:
                below += "".join(f"<mn>{_SUBSCRIPTS[x]}</mn>" for x in text)
            else:
                script = self.row("}") if text[1] == "{" else _indices(text[1:])
                below, above = (below + script, above) if text[0] == "_" else (below, above + script)
        return _scripts(base, below, above, limits=token.text in _WITH_LIMITS)

    def _base(self, token: Token) -> str:
        if token.kind == "open":
            inside = self.row(_CLOSING[token.text])
            return f"<mrow><mo>{token.text}</mo>{inside}<mo>{_CLOSING[token.text]}</mo></mrow>"
        if token.kind == "big":
            sign = token.text.replace("Σ", "∑")
            return f"<mo lspace='{_THIN}' rspace='0.12em' movablelimits='false' form='prefix'>{sign}</mo>"
        if token.kind == "fence":
            return f"<mo stretchy='false' lspace='0' rspace='0'>{token.text}</mo>"
        if token.kind == "comma":
            return f"<mo lspace='0' rspace='{_MEDIUM}'>{token.text}</mo>"
        if token.kind == "quoted":
            return f"<mtext>{escape(token.text)}</mtext>"
        if token.kind == "script":
            raise ValueError(f"{token.text!r} in the formula {self.formula!r} follows nothing")
        return _word(token.text)


def _superscript(character: str) -> str:
    text = _SUPERSCRIPTS[character]
    return f"<mn>{text}</mn>" if text.isdigit() else f"<mo lspace='0' rspace='0'>{text}</mo>"


def _scripts(base: str, below: str, above: str, *, limits: bool) -> str:
    if not below and not above:
        return base
    name = ("munder" if limits else "msub") if not above else ("msup" if not below else "msubsup")
    scripts = "".join(f"<mrow>{x}</mrow>" for x in (below, above) if x)
    return f"<{name}>{base}{scripts}</{name}>"


def pieces(formula: str) -> list[list[str]]:
    """Return the lines of a formula, each in the pieces between which it may wrap on a narrow screen.

    A line that begins with a space continues the one above. Outside of brackets a line may wrap at five spaces or more, and
    before an operator with two spaces around it.

    Examples:
        >>> pieces("a = [ b\\n      + c ]  +  d,      e = f\\ng   = h")
        [['a = [ b  + c ]', '+  d,', 'e = f'], ['g   = h']]
    """
    return [_wrapped(line) for line in re.sub(r"\n +", "  ", formula).split("\n")]


def _wrapped(line: str) -> list[str]:
    found, start = [], 0
    for gap in _MAY_WRAP.finditer(line):
        before = line[: gap.start()]
        if all(before.count(bracket) == before.count(closing) for bracket, closing in _CLOSING.items()):
            found.append(line[start : gap.start()])
            start = gap.end()
    return [*found, line[start:]]


def mathml(formula: str) -> str:
    """Return a formula as HTML, one paragraph per line.

    Raises:
        ValueError: a piece is not in the notation, or its brackets do not match.

    Examples:
        >>> mathml("t")
        '<div class="formula"><p><math displaystyle="true"><mrow><mi>t</mi></mrow></math></p></div>'
        >>> mathml("max(0, x")
        Traceback (most recent call last):
        ValueError: the brackets of the formula 'max(0, x' do not match
    """
    paragraphs = [
        "<p>" + " ".join(f'<math displaystyle="true">{_Parser(piece).row()}</math>' for piece in line) + "</p>"
        for line in pieces(formula)
    ]
    return f'<div class="formula">{"".join(paragraphs)}</div>'
