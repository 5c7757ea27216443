"""The tables of the page, in Markdown."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version

import torch
from pytorch_metric_learning import losses, miners

from tools.pml_matrix.cases import Case, inside
from tools.pml_matrix.constructors import AROUND_ANOTHER, BASES, MODULES, parts
from tools.pml_matrix.measurement import Row


class _Notes:
    """Notes of the table, numbered in the order of their first use."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def mark(self, reason: str) -> str:
        reason = " ".join(reason.split()).replace("|", "/")
        reason = f"{reason} without a text" if reason.endswith(":") else reason
        short = reason if len(reason) <= 160 else f"{reason[:160]} …"
        return f"<sup>{self.numbers.setdefault(short, len(self.numbers) + 1)}</sup>"

    def cell(self, row: Row) -> str:
        if row.wrong:
            return "✗" + "".join(self.mark(f"{list(shards)}: {why}") for shards, why in row.wrong.items())
        return "✓" if row.unsupported is None else f"–{self.mark(row.unsupported)}"

    def lines(self) -> list[str]:
        return [f"{number}. {reason}" for reason, number in self.numbers.items()]


def counted(body: Sequence[Sequence[str]]) -> str:
    """Return how many cells of a table are which.

    Examples:
        >>> counted([["✓", "–<sup>1</sup>"], ["✓", "✓"]])
        '3 equal to one process, 1 not supported on one process, 0 different'
    """
    count = Counter(cell[0] for cells in body for cell in cells)
    return f"{count['✓']} equal to one process, {count['–']} not supported on one process, {count['✗']} different"


def folded(summary: str, lines: Sequence[str]) -> list[str]:
    """Return lines of Markdown that a page shows when a reader opens their summary."""
    return ['<details markdown="1">', f"<summary>{summary}</summary>", "", *lines, "", "</details>", ""]


def page(rows: Sequence[Row]) -> str:
    """Return the tables and their notes."""
    by_case, notes = {row.case: row for row in rows}, _Notes()
    names = parts(losses)

    def table(title: str, columns: Mapping[str, Callable[[str], Case]]) -> list[str]:
        head = [f"| {title} | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
        body = [[notes.cell(by_case[case(loss)]) for case in columns.values()] for loss in names]
        lines = (f"| {loss} | {' | '.join(cells)} |" for loss, cells in zip(names, body, strict=True))
        return folded(f"{title.capitalize()}: {counted(body)}", [*head, *lines])

    def of_part(setting: str) -> Mapping[str, Callable[[str], Case]]:
        return {x: partial(Case, parts=((setting, x),)) for x in parts(MODULES[setting])}

    calls = {
        "`ref_emb`, `ref_labels`": partial(Case, references=True),
        "the same with a miner": partial(Case, miner="MultiSimilarityMiner", references=True),
        "`DistributedMiner`": partial(Case, miner="BatchHardMiner", mined="outside"),
    }
    tables = [
        *table("loss with miner", {"no miner": Case} | {x: partial(Case, miner=x) for x in parts(miners)}),
        *table("loss inside", {f"`{x}`": partial(inside, x) for x in AROUND_ANOTHER}),
        *table("loss with reducer", of_part("reducer")),
        *table("loss with distance", of_part("distance")),
        *table("loss with embedding regularizer", of_part("embedding_regularizer")),
        *table("loss with weight regularizer", of_part("weight_regularizer")),
        *table("call", calls),
    ]
    measured = [(shards, why) for row in rows for shards, why in row.verdicts.items()]
    by_split = Counter(shards for shards, _ in measured)
    wrong = Counter(shards for shards, why in measured if why)
    splits = ["| W | samples by rank | compared | different |", "|---|---|---|---|"]
    splits += [f"| {len(x)} | {list(x)} | {by_split[x]} | {wrong[x]} |" for x in sorted(by_split, key=lambda x: len(x))]
    left_out = [f"- `{name}`: {why}." for name, why in BASES.items()]
    return "\n".join(
        [
            f"pytorch-metric-learning {version('pytorch-metric-learning')}, torch {torch.__version__.split('+')[0]}.",
            "",
            *splits,
            "",
            "✓ equal to one process; – not supported by the library on one process, for the reason in the note, and the "
            "same error on every rank; ✗ different, with split and reason in the note.",
            "",
            *tables,
            *folded(f"The {len(notes.numbers)} notes", notes.lines()),
            "Exported, but not compared:",
            "",
            *left_out,
        ]
    )
