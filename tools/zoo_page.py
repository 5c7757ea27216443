"""The zoo as a page: ``python -m tools.zoo_page > docs/pages/zoo.md``."""

from contrastive_zoo.catalogue import CATALOGUE

_HEAD = """# The zoo

Every loss of the library, generated from the code by `python -m tools.zoo_page`. All of them are the same function
on any number of processes under `DistributedLoss`, and none holds the N × N matrix. GEMM counts are forward + backward, in
units of one N × d × N product. [Coming from another library](coming-from.md) has the line-by-line changes.
"""


def as_markdown() -> str:
    """The zoo as a page, a section per family.

    Example:
        >>> as_markdown().splitlines()[0]
        '# The zoo'
    """
    lines = [_HEAD]
    for family in dict.fromkeys(species.family for species in CATALOGUE.values()):
        lines += [
            f"## {family.capitalize()}\n",
            "| name | loss | called with | engine | elsewhere |",
            "|---|---|---|---|---|",
        ]
        mine = [species for species in CATALOGUE.values() if species.family == family]
        for species in mine:
            made = f"`{species.cls}({', '.join(f'{name}={value!r}' for name, value in species.settings)})`"
            row = (f"`{species.name}`", made, f"`{species.called_with}`", species.engine, species.peers or "–")
            lines.append(f"| {' | '.join(row)} |")
        lines.append("")
        for cls in dict.fromkeys(species.cls for species in mine):
            species = next(x for x in mine if x.cls == cls)
            lines.append(f"**{cls}.** {species.summary} {species.source}\n")
            lines.append(f"Parameters: `{species.parameters}`\n")
            if species.formula:
                lines.append(f"```text\n{species.formula}\n```\n")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
