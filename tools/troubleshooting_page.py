"""Write the list of error messages into the page: ``python -m tools.troubleshooting_page``.

Messages are read from the source: every sentence that the package holds as a string and that is no docstring.
"""

import ast
import re
from collections.abc import Iterator

from tools.pages import PAGES, ROOT, filled

PAGE = PAGES / "troubleshooting.md"

GROUPS = {
    "The wrapper, and what ranks disagree on": ("wrapper", "ranks"),
    "Losses": ("losses", "loss_base", "engine"),
    "Mining, sampling, evaluation, monitoring": ("data", "metrics"),
    "Adapters": ("adapters",),
    "Command line": ("testing/check_target",),
}
"""Headings, and the rooms or modules whose messages are below each; texts of other modules are no errors of a training."""

NO_ERRORS = {"cost.py", "explain.py"}
"""Modules whose texts answer a question."""

FEWEST_SPACES = 4  # a string with fewer is a name or a fragment


def template(node: ast.AST) -> str | None:
    """Return the text of a string expression, with … for each value; None for other expressions.

    Examples:
        >>> template(ast.parse('f"rank {r} holds " + "none"', mode="eval").body)
        'rank … holds none'
    """
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(x.value) if isinstance(x, ast.Constant) else "…" for x in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = template(node.left), template(node.right)
        return None if left is None and right is None else (left or "…") + (right or "…")
    return None


def _outermost_strings(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring, or the documentation of an attribute
    found = template(node)
    if found is not None:
        yield found
        return
    for child in ast.iter_child_nodes(node):
        yield from _outermost_strings(child)


def shown(text: str) -> str:
    """Return a message as the page shows it: one … for each value or row of values, no punctuation in front.

    Examples:
        >>> shown("…: ranks disagree on the width of {name}: rank 0 has … …")
        'ranks disagree on the width of …: rank 0 has …'
    """
    text = re.sub(r"\{[a-z_]+\}", "…", " ".join(text.split()))
    return re.sub(r"^…?[.:,;] ", "", re.sub(r"…(?: ?…)+", "…", text))


def messages(module: ast.Module) -> list[str]:
    found = (shown(x) for x in _outermost_strings(module))
    return list(dict.fromkeys(x for x in found if x.count(" ") >= FEWEST_SPACES and any(c.islower() for c in x)))


def as_markdown() -> str:
    lines: list[str] = []
    for heading, names in GROUPS.items():
        lines += ["", f"### {heading}", ""]
        for name in names:
            path = ROOT / "contrastive_zoo" / name
            modules = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
            for module in (x for x in modules if x.name not in NO_ERRORS):
                where = ".".join(module.relative_to(path.parent).with_suffix("").parts).removesuffix(".__init__")
                tree = ast.parse(module.read_text(encoding="utf-8"))
                lines += [f"- ``{message}`` – {where}" for message in messages(tree)]
    return "\n".join(lines).strip()


def with_messages(page: str) -> str:
    return filled(page, "messages", as_markdown())


if __name__ == "__main__":
    PAGE.write_text(with_messages(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
