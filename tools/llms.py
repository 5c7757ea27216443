"""Pages as plain Markdown for assistants: docstrings in place of the directives that name them."""

import inspect
import pydoc
import re

_DIRECTIVE = re.compile(r"^::: contrastive_zoo\.([\w.]+)\n(?:    options:.*\n?)?", re.MULTILINE)
_META = re.compile(r"\A---\n.*?^---\n", re.MULTILINE | re.DOTALL)


def with_docstrings(markdown: str) -> str:
    """Return a page of the reference with signatures and docstrings.

    Examples:
        >>> print(with_docstrings("::: contrastive_zoo.NTXent\\n").splitlines()[0])
        # NTXent
    """

    def described(directive: re.Match[str]) -> str:
        name = directive[1]
        found = pydoc.locate(f"contrastive_zoo.{name}")
        is_error = isinstance(found, type) and issubclass(found, Exception)
        call = f"`{name}{inspect.signature(found)}`\n\n" if callable(found) and not is_error else ""
        return f"# {name}\n\n{call}{inspect.getdoc(found)}\n"

    return _DIRECTIVE.sub(described, markdown)


def first_sentence(markdown: str) -> str:
    """Return the first sentence of a page, without its heading and its meta data.

    Examples:
        >>> first_sentence("# Ring\\n\\nYou pass\\ncandidates. More.")
        'You pass candidates.'
    """
    paragraphs = _META.sub("", markdown).split("\n\n")
    text = next((x for x in paragraphs if x.strip() and not x.lstrip().startswith(("#", "`", "<", "|", "!"))), "")
    return re.split(r"(?<=[.?!]) ", " ".join(text.split()), maxsplit=1)[0]
