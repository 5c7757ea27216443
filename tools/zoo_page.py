"""Write the list of losses into the page on which to choose: ``python -m tools.zoo_page``."""

import re

from contrastive_zoo.testing.catalogue import CATALOGUE, Entry
from tools.pages import PAGES, fill


def reference_page(family: str) -> str:
    """Return the page of the reference that has the losses of a family.

    Examples:
        >>> reference_page("sigmoid over pairs")
        'reference/losses-sigmoid-over-pairs.md'
    """
    return f"reference/losses-{family.replace(' ', '-')}.md"


def with_losses(markdown: str) -> str:
    r"""Return a page of the reference with the losses of a family in place of a comment that names it.

    Examples:
        >>> print(with_losses("<!-- losses: sigmoid over pairs -->").split("\n\n:::")[0].strip())
        ::: contrastive_zoo.SigLIP
            options: { members: false }
        <BLANKLINE>
        - Cost: rows: 3 GEMM
        - On the command line: `siglip`
        - Elsewhere: open_clip SigLipLoss
    """

    def listed(comment: re.Match[str]) -> str:
        entries: dict[str, Entry] = {}
        for entry in (x for x in CATALOGUE.values() if x.family == comment[1]):
            entries.setdefault(entry.cls, entry)
        return "\n\n".join(map(_in_reference, entries.values()))

    return re.sub(r"^<!-- losses: ([\w ]+) -->$", listed, markdown, flags=re.MULTILINE)


def _in_reference(entry: Entry) -> str:
    return f"""::: contrastive_zoo.{entry.cls}
    options: {{ members: false }}

- Cost: {entry.engine}
- On the command line: `{entry.name}`
""" + (f"- Elsewhere: {entry.peers}\n" if entry.peers else "")


def as_markdown() -> str:
    """Return a heading for each family of the catalogue, and a line for each loss.

    Examples:
        >>> as_markdown().splitlines()[2].partition("{")[0]
        '- [NTXent](reference/losses-softmax-over-pairs.md#contrastive_zoo.NTXent)'
    """
    lines: dict[str, dict[str, str]] = {}
    for entry in CATALOGUE.values():
        link = f"[{entry.cls}]({reference_page(entry.family)}#contrastive_zoo.{entry.cls}){{ #{entry.cls.lower()} }}"
        summary = entry.summary.removeprefix("Compute ").rstrip(".").replace("``", "`")
        peers = f" ({entry.peers})" if entry.peers else ""
        lines.setdefault(entry.family, {}).setdefault(entry.cls, f"- {link}: {summary}{peers}")
    return "\n\n".join(f"### {x.capitalize()}\n\n" + "\n".join(of.values()) for x, of in lines.items())


if __name__ == "__main__":
    fill(PAGES / "zoo.md", {"zoo": as_markdown()})
