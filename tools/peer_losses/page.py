"""The table of the page, in Markdown."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from zlib import crc32

from tools.comparison import GROUPS, Compared, Run, worst
from tools.pages import table
from tools.peer_losses.losses import LEFT_OUT, PeerLoss
from tools.peer_losses.packages import required

SHOWN = GROUPS[:3]


def _cells(compared: Compared) -> list[str]:
    if compared.words is not None:
        return ["refused", *[""] * (len(SHOWN) - 1)]
    numbers = [compared.differences.get(group) for group in SHOWN]
    return ["–" if x is None else "0" if x == 0 else f"{x:.0e}" for x in numbers]


def page(rows: Sequence[tuple[PeerLoss, Mapping[Run, Compared]]]) -> str:
    """Return the table of all losses, the words of those that are refused, and what is not compared."""
    sizes = sorted({len(run.steps[0]) for _, compared in rows for run in compared})

    def of_size(compared: Mapping[Run, Compared], size: int) -> Compared:
        return worst([x for run, x in compared.items() if len(run.steps[0]) == size])

    groups = ("value", "encoder", "own parameters")
    head = ["library", "loss", "call", *(f"W = {size}: {group}" for size in sizes for group in groups)]
    lines = [
        [
            peer.package,
            f"`{peer}`",
            f"`{peer.call}`",
            *(cell for size in sizes for cell in _cells(of_size(compared, size))),
        ]
        for peer, compared in rows
    ]
    refused = [(peer, next(iter(of.values())).words) for peer, of in rows]
    installed = {**required(), "sentence-transformers": version("sentence-transformers")}
    packages = {peer.package for peer, _ in rows}
    versions = ", ".join(f"{name} {number}" for name, number in installed.items() if name in packages)
    return "\n".join(
        [
            f"{len(rows)} losses. {versions}.",
            "",
            '<details markdown="1">',
            "<summary>The largest errors on two and three ranks, relative to the larger of 1 and the expected</summary>",
            "",
            table(head, lines, texts=3),
            "",
            "</details>",
            "",
            *(f"- `{peer}` of {peer.package} is refused: {words}" for peer, words in refused if words),
            "",
            "Not compared:",
            "",
            *(f"- {name.replace(' ', ' `', 1)}`: {why}." for name, why in LEFT_OUT.items()),
        ]
    )


def drawn(peer: PeerLoss) -> bool:
    """Whether a loss is among the eighth that every run of the tests compares."""
    return crc32(f"{peer.package} {peer}".encode()) % 8 == 0
