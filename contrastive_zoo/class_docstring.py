"""The docstring of a loss's class, put together from its function's: formula, settings, errors, an example, source."""

import ast
import inspect
import re
from collections.abc import Iterable, Sequence

_SECTIONS = ("Args", "Raises", "Examples", "Source")
_SECTION = re.compile(rf"^({'|'.join(_SECTIONS)}):", re.MULTILINE)
_CHECK_FINITE = "check_finite: whether NaN and infinite values are refused."


def class_docstring(
    name: str,
    own: str | None,
    function: str,
    *,
    function_name: str,
    compared: Sequence[str],
    settings: Sequence[str],
    inherited: Iterable[str | None] = (),
) -> str:
    """The docstring of the class ``name``, whose instances hold ``settings`` and compute the function.

    What ``own`` says comes after the formula; its entries of Args and its Examples take the place of the function's, and the
    function's Raises follow its own.

    Args:
        name: of the class.
        own: the docstring that is written in the class.
        function: the function's docstring.
        function_name: as its examples call it.
        compared: names of the arguments of a call, such as ``*views``.
        settings: names of the arguments of the constructor.
        inherited: docstrings of base classes, which may document further settings.

    Examples:
        >>> text = '''The mean.
        ...
        ... Args:
        ...     x: [n].
        ...     times: a factor.
        ...
        ... Examples:
        ...     >>> mean(x, times=2.0)   # 2 · 1
        ...     2.0'''
        >>> kwargs = {"function_name": "mean", "compared": ["x"], "settings": ["times"]}
        >>> lines = class_docstring("Mean", None, text, **kwargs).splitlines()
        >>> lines[2:8]
        ['Called as ``loss(x)``:', '', '- x: [n].', '', 'Args:', '    times: a factor.']
        >>> lines[-2].strip()
        '>>> Mean(times=2.0)(x)   # 2 · 1'
    """
    of_class, of_function = _sections(own), _sections(function)
    documented = _entries(f"    {_CHECK_FINITE}")
    for text in [*reversed([_sections(x)["Args"] for x in inherited]), of_function["Args"], of_class["Args"]]:
        documented |= _entries(text)
    paragraphs = [of_function[""], of_class[""]]
    arguments = [documented[x.lstrip("*")] for x in compared if x.lstrip("*") in documented]
    if arguments:
        call = ", ".join(x.lstrip("*") if x[0] != "*" else f"{x[1:-1]}1, {x[1:-1]}2, …" for x in compared)
        bullets = "\n".join("- " + x[4:].replace("\n      ", "\n") for x in arguments)
        paragraphs.append(f"Called as ``loss({call})``:\n\n{bullets}")
    args = "\n".join(documented[x] for x in settings if x in documented)
    paragraphs.append(f"Args:\n{args}" if args else "")
    for section in _SECTIONS[1:]:
        text = of_class[section] or of_function[section]
        if section == "Raises" and of_class[section]:  # the constructor's errors, then those of a call
            text = of_class[section] + of_function[section]
        if section == "Examples" and not of_class[section]:
            text = "\n".join(_of_class(line, name, function_name) for line in text.split("\n"))
        paragraphs.append(f"{section}:{text}" if text else "")
    return "\n\n".join(filter(None, paragraphs))


def _sections(docstring: str | None) -> dict[str, str]:
    """The text of each section, and under "" what comes before them."""
    before, *parts = _SECTION.split(inspect.cleandoc(docstring or ""))
    found = {section: text.rstrip() for section, text in zip(parts[::2], parts[1::2], strict=True)}
    return {"": before.strip(), **dict.fromkeys(_SECTIONS, ""), **found}


def _entries(args: str) -> dict[str, str]:
    """Entries of an Args section by their names, with their continuation lines."""
    return {x.partition(":")[0].strip(): x.rstrip() for x in re.split(r"^(?=    \w)", args, flags=re.MULTILINE)}


def _of_class(line: str, name: str, function_name: str) -> str:
    """A line of an example in which the class stands in the function's place."""
    prompt, is_source, source = line.partition(">>> ")
    if not is_source:
        return line
    try:
        calls = [x for x in ast.walk(ast.parse(source)) if isinstance(x, ast.Call)]
    except SyntaxError:  # it goes on in the next line
        return line
    for call in calls:
        if isinstance(call.func, ast.Name) and call.func.id == function_name:
            text = [ast.get_source_segment(source, x) or "" for x in (*call.args, *(x.value for x in call.keywords))]
            rows, values = text[: len(call.args)], text[len(call.args) :]
            settings = [f"{x.arg}={value}" for x, value in zip(call.keywords, values, strict=True)]
            of_class = f"{name}({', '.join(settings)})({', '.join(rows)})"
            source = source.replace(ast.get_source_segment(source, call) or "", of_class)
    return f"{prompt}>>> {source}"
