"""Write the sections of all losses into the page of the catalogue: ``python -m tools.zoo_page``."""

import re

from contrastive_zoo.testing.catalogue import CATALOGUE, Entry
from tools.pages import PAGES, fill, table


def anchor(cls: str) -> str:
    return cls.lower()


def linked(text: str) -> str:
    """Return a text whose addresses are links, named by what they are.

    Examples:
        >>> linked("Chen 2020, https://arxiv.org/abs/2002.05709; more")
        'Chen 2020, [arXiv:2002.05709](https://arxiv.org/abs/2002.05709); more'
    """

    def link(match: re.Match[str]) -> str:
        url = match[0].rstrip(",;.")
        name = re.sub(r"^https?://(www\.)?", "", url)
        for prefix, short in (("arxiv.org/abs/", "arXiv:"), ("doi.org/", "doi:")):
            name = short + name[len(prefix) :] if name.startswith(prefix) else name
        name = name if name.startswith(("arXiv:", "doi:")) else name.partition("/")[0]
        return f"[{name}]({url}){match[0][len(url) :]}"

    return re.sub(r"https?://\S+", link, text)


def reference_page(family: str) -> str:
    """Return the page of the reference that has the losses of a family.

    Examples:
        >>> reference_page("sigmoid over pairs")
        'reference/losses-sigmoid-over-pairs.md'
    """
    return f"reference/losses-{family.replace(' ', '-')}.md"


def with_losses(markdown: str) -> str:
    """Return a page of the reference with the losses of a family in place of a comment that names it.

    Examples:
        >>> print(with_losses("<!-- losses: sigmoid over pairs -->"))
        ::: contrastive_zoo.SigLIP
            options: { members: false }
        <BLANKLINE>
        ::: contrastive_zoo.SupSigmoid
            options: { members: false }
    """

    def listed(comment: re.Match[str]) -> str:
        names = dict.fromkeys(entry.cls for entry in CATALOGUE.values() if entry.family == comment[1])
        return "\n\n".join(f"::: contrastive_zoo.{name}\n    options: {{ members: false }}" for name in names)

    return re.sub(r"^<!-- losses: ([\w ]+) -->$", listed, markdown, flags=re.MULTILINE)


def _section(entries: list[Entry]) -> list[str]:
    first = entries[0]
    lines = [f"### {first.cls} {{ #{anchor(first.cls)} }}\n", f"{first.summary}\n"]
    if first.formula:
        lines.append(f"```text\n{first.formula}\n```\n")
    for entry in entries:
        settings = ", ".join(f"{name}={value!r}" for name, value in entry.settings.items())
        lines.append(
            f"- `{entry.cls}({settings})(…)` of `{entry.called_with}`: `{entry.name}` on the command line; {entry.engine}"
        )
        if entry.peers:
            lines.append(f"    - elsewhere: {entry.peers}")
    reference = f"[reference]({reference_page(first.family)}#contrastive_zoo.{first.cls})"
    lines += [f"- parameters: `{first.parameters}`; {reference}", f"- source: {linked(first.source)}"]
    return [*lines, ""]


def as_markdown() -> str:
    """Return a table of the families of the catalogue, and a section per family and per loss.

    Examples:
        >>> as_markdown().splitlines()[0]
        '## All losses'
    """
    families: dict[str, dict[str, list[Entry]]] = {}
    for entry in CATALOGUE.values():
        families.setdefault(entry.family, {}).setdefault(entry.cls, []).append(entry)
    links = [[family, ", ".join(f"[{cls}](#{anchor(cls)})" for cls in by_cls)] for family, by_cls in families.items()]
    lines = ["## All losses\n", table(["family", "losses"], links), ""]
    for family, by_cls in families.items():
        lines.append(f"## {family.capitalize()}\n")
        for entries in by_cls.values():
            lines += _section(entries)
    return "\n".join(lines).rstrip()


if __name__ == "__main__":
    fill(PAGES / "zoo.md", {"zoo": as_markdown()})
