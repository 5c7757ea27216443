"""Write the list of losses into the page on which to choose: ``python -m tools.zoo_page``."""

import re

from contrastive_zoo.testing.catalogue import CATALOGUE, Entry
from tools.docstrings import summary
from tools.loss_pages import by_class, path_of
from tools.pages import PAGES, fill


def with_losses(markdown: str) -> str:
    """Return a page of the reference with the losses of a family in place of a comment that names it.

    Examples:
        >>> print(with_losses("<!-- losses: sigmoid over pairs -->").split("\\n")[0].partition(":")[0])
        - [SigLIP](losses/SigLIP.md)
    """

    def listed(comment: re.Match[str]) -> str:
        entries = [x[0] for x in by_class().values() if x[0].family == comment[1]]
        return "\n".join(f"- [{x.cls}]({path_of(x.cls).removeprefix('reference/')}): {_summary(x)}" for x in entries)

    return re.sub(r"^<!-- losses: ([\w ]+) -->$", listed, markdown, flags=re.MULTILINE)


def _summary(entry: Entry) -> str:
    return summary(entry.loss).removeprefix("Compute ").rstrip(".").replace("``", "`")


def as_markdown() -> str:
    """Return a heading for each family of the catalogue, and a line for each loss.

    Examples:
        >>> as_markdown().splitlines()[2].partition("{")[0]
        '- [NTXent](reference/losses/NTXent.md)'
    """
    lines: dict[str, dict[str, str]] = {}
    for entry in CATALOGUE.values():
        link = f"[{entry.cls}]({path_of(entry.cls)}){{ #{entry.cls.lower()} }}"
        peers = f" ({entry.peers})" if entry.peers else ""
        lines.setdefault(entry.family, {}).setdefault(entry.cls, f"- {link}: {_summary(entry)}{peers}")
    return "\n\n".join(f"### {x.capitalize()}\n\n" + "\n".join(of.values()) for x, of in lines.items())


if __name__ == "__main__":
    fill(PAGES / "zoo.md", {"zoo": as_markdown()})
