"""Print the page of the catalogue: ``python -m tools.zoo_page > docs/pages/zoo.md``."""

from contrastive_zoo.catalogue import CATALOGUE

_HEAD = """# The zoo

Which losses does the library have, what are their formulas and settings, and what do other libraries call them?
For people who choose a loss. `python -m tools.zoo_page` generates this page from the code.

Under `DistributedLoss` every loss is the same function on any number of processes, and none holds the N × N matrix. GEMM
counts are forward + backward, in units of one N × d × N matmul; *cached* means with cached logits. [Coming from another
library](coming-from.md) lists the changes line by line.
"""


def as_markdown() -> str:
    """Return the documentation page of the catalogue, with a section per family.

    Examples:
        >>> as_markdown().splitlines()[0]
        '# The zoo'
    """
    lines = [_HEAD]
    for family in dict.fromkeys(entry.family for entry in CATALOGUE.values()):
        lines += [
            f"## {family.capitalize()}\n",
            "| name | loss | called with | engine | in other libraries |",
            "|---|---|---|---|---|",
        ]
        members = [entry for entry in CATALOGUE.values() if entry.family == family]
        for entry in members:
            call = f"`{entry.cls}({', '.join(f'{name}={value!r}' for name, value in entry.settings)})`"
            row = (f"`{entry.name}`", call, f"`{entry.called_with}`", entry.engine, entry.peers or "–")
            lines.append(f"| {' | '.join(row)} |")
        lines.append("")
        for cls in dict.fromkeys(entry.cls for entry in members):
            entry = next(x for x in members if x.cls == cls)
            lines.append(f"**{cls}.** {entry.summary} {entry.source}\n")
            lines.append(f"Parameters: `{entry.parameters}`\n")
            if entry.formula:
                lines.append(f"```text\n{entry.formula}\n```\n")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
