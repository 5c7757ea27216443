"""Print the page of the catalogue: ``python -m tools.zoo_page > docs/pages/zoo.md``."""

import inspect
import re
from pathlib import Path

from contrastive_zoo.testing.catalogue import CATALOGUE, Entry
from tools.troubleshooting_page import messages

_HEAD = """# The zoo

Which losses does the library have, what are their formulas and settings, and what do other libraries call them?
For people who choose a loss. `python -m tools.zoo_page` generates this page from the code.

Under `DistributedLoss` every loss is the same function on any number of processes, and none holds the N × N matrix. GEMM
counts are forward + backward, in units of one N × d × N matmul; *cached* means with cached logits. [Coming from another
library](coming-from.md) lists the changes line by line.

## Which loss should I use? { #which }

"""

ADVICE = (
    (
        "two augmented views of each sample, no labels",
        ("NTXent", "DCL", "VICReg"),
        "Start with NTXent at temperature 0.1 to 0.5 and a large global batch. With small batches try DCL, which "
        "needs fewer negatives. VICReg and BarlowTwins need no negatives at all, but wide embeddings.",
    ),
    (
        "two towers: images and texts, queries and documents",
        ("Clip", "SigLIP", "MNRL"),
        "Clip learns its temperature; log it. SigLIP has a bias and does not depend on the batch through a softmax. "
        "Use MNRL for queries with hard negatives, and MultiPositive if a key has several queries.",
    ),
    (
        "class labels, few classes, many samples of each",
        ("SupCon", "NormalizedSoftmax", "ArcFace"),
        "SupCon needs two samples of each class in the batch: use `MPerClassBatchSampler`. A classifier such as "
        "NormalizedSoftmax does not. ArcFace adds a margin; begin with a small one.",
    ),
    (
        "class labels, many classes, few samples of each",
        ("ProxyAnchor", "MultiSimilarity", "Triplet"),
        "ProxyAnchor needs no pairs in the batch. MultiSimilarity and Triplet(mining='semi-hard') need m samples per "
        "class in each batch. With millions of classes split the weights over ranks: `shard_over=`.",
    ),
    (
        "pairs with scores, such as sentence similarity",
        ("CoSENT", "AnglE", "MarginMSE"),
        "CoSENT uses the order of the scores only, AnglE adds angles. With a teacher's scores of a positive and of "
        "negatives take MarginMSE or ScoreDistillation. For pairs labelled 0 or 1 take OnlineContrastive.",
    ),
    (
        "retrieval measured by average precision",
        ("SmoothAP", "FastAP", "RankedList"),
        "SmoothAP and FastAP optimise a smooth form of the metric. RankedList separates positives from negatives by a "
        "margin. All profit from a large global batch, and from a model that another loss has trained first.",
    ),
    (
        "embeddings of tokens or patches: ColBERT, ColPali",
        ("MaxSim", "MaxSimPairwise"),
        "MaxSim compares a query with the documents of all ranks. MaxSimPairwise compares it with its hardest document "
        "only. Numbers of tokens may differ between ranks.",
    ),
    (
        "a teacher network or a momentum encoder",
        ("InfoNCE", "DINO", "NegativeCosine"),
        "InfoNCE with a `MemoryQueue` is MoCo. DINO and NegativeCosine need no negatives; the teacher has no "
        "gradient. ClipDistillation has a teacher of two towers.",
    ),
    (
        "a small batch that memory limits",
        ("NTXent", "SupCon"),
        "`GradCache` computes the loss of a batch whose activations do not fit. A `CrossBatchMemory` adds samples of "
        "earlier batches. Both are exact on any number of processes.",
    ),
)
"""What one has, losses to try, and three lines of advice."""


def anchor(cls: str) -> str:
    """Return the anchor of a loss's heading."""
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


def errors(cls: type) -> list[str]:
    """Return the messages in the module of a loss.

    Examples:
        >>> import contrastive_zoo as cz
        >>> "semi-hard negatives lie within a positive margin" in errors(cz.Triplet)
        True
    """
    return messages(Path(inspect.getfile(cls)))


def _advice() -> list[str]:
    lines = ["| you have | try | advice |", "|---|---|---|"]
    for have, losses, advice in ADVICE:
        lines.append(f"| {have} | {', '.join(f'[{x}](#{anchor(x)})' for x in losses)} | {advice} |")
    return [*lines, ""]


def _section(entries: list[Entry]) -> list[str]:
    """Return the section of one class, which several entries may have."""
    first = entries[0]
    lines = [f"### {first.cls} {{ #{anchor(first.cls)} }}\n", f"{first.summary}\n"]
    if first.formula:
        lines.append(f"```text\n{first.formula}\n```\n")
    for entry in entries:
        settings = ", ".join(f"{name}={value!r}" for name, value in entry.settings)
        lines.append(
            f"- `{entry.cls}({settings})(…)` of `{entry.called_with}`: `{entry.name}` on the command line; {entry.engine}"
        )
        if entry.peers:
            lines.append(f"    - elsewhere: {entry.peers}")
    reference = f"[reference]({reference_page(first.family)}#contrastive_zoo.{first.cls})"
    lines += [f"- parameters: `{first.parameters}`; {reference}", f"- source: {linked(first.source)}"]
    if found := errors(first.loss):
        lines += ["- errors of its own:", *(f"    - ``{message}``" for message in found)]
    return [*lines, ""]


def as_markdown() -> str:
    """Return the documentation page of the catalogue, with a section per family and per loss.

    Examples:
        >>> as_markdown().splitlines()[0]
        '# The zoo'
    """
    families = list(dict.fromkeys(entry.family for entry in CATALOGUE.values()))
    members = {family: [entry for entry in CATALOGUE.values() if entry.family == family] for family in families}
    lines = [_HEAD.rstrip() + "\n", *_advice(), "## All losses\n", "| family | losses |", "|---|---|"]
    for family, entries in members.items():
        classes = dict.fromkeys(entry.cls for entry in entries)
        lines.append(f"| {family} | {', '.join(f'[{cls}](#{anchor(cls)})' for cls in classes)} |")
    lines.append("")
    for family, entries in members.items():
        lines.append(f"## {family.capitalize()}\n")
        for cls in dict.fromkeys(entry.cls for entry in entries):
            lines += _section([entry for entry in entries if entry.cls == cls])
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
