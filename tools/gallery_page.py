"""Measure the gallery and write its pages: ``python -m tools.gallery_page``.

Writes the tables of docs/pages/gallery.md, and the truth table in README.md.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version

from contrastive_zoo.testing.batch import GlobalBatch
from contrastive_zoo.testing.check import Report, examine
from contrastive_zoo.testing.evidence import CLOSE, Ratio, flat, is_near
from contrastive_zoo.testing.measurement import Case, Gradients, Trial
from contrastive_zoo.testing.worlds import RankError, Worlds
from tools.gallery.recipe import GALLERY, PEERS, Recipe
from tools.pages import PAGES, ROOT, fill, table

TRUTH_TABLE = (
    ("autograd.Function whose backward keeps only this rank's slice (SimCLR re-implementations)", "own slice"),
    ("gather, then overwrite this rank's slice with the live tensor", "overwritten slice"),
    ("gather, overwrite the slice, multiply the loss by W", "own slice × W"),
    ("pytorch-metric-learning 2.9.0's `DistributedLossWrapper`", "pml wrapper, proxies"),
    ("that wrapper with `efficient=True`", "pml wrapper, efficient"),
    ("local anchors against detached gathered candidates (OpenCLIP `local_loss`)", "detached candidates"),
    ("local anchors, gather with a reduce-scatter backward (lightly, OpenCLIP `gather_with_grad`)", "local loss"),
    ("local anchors, `gather_with_grad`, loss averaged over ranks", "mean of means"),
    ("`DistributedLoss(loss)`", "DistributedLoss, any loss"),
)
"""Rows of the truth table, by recipe."""

TRUTHS = "what people write", "encoder gradient", "loss's own parameters", "value returned", "what uneven shards change"
MEASUREMENTS = "what people write", "verdict", "what is wrong"
"""Heads of the tables."""

EVEN, UNEVEN = GlobalBatch((6, 6, 6, 6), d=4), GlobalBatch((3, 9), d=4)


@dataclass(frozen=True)
class Measured:
    """What a recipe gave on one global batch of W ranks, relative to one process, or how it failed."""

    world_size: int
    values: tuple[float, ...] = ()
    encoder: tuple[float, float] | None = None
    parameters: tuple[float, float] | None = None
    failure: str | None = None


@dataclass(frozen=True)
class Row:
    """A recipe, its measurements on equal shards of four processes and on unequal ones of two, and its report."""

    recipe: Recipe
    even: Measured
    uneven: Measured
    report: Report

    @cached_property
    def on_even(self) -> tuple[str, str, str]:
        return _describe(self.even)

    @cached_property
    def on_uneven(self) -> str:
        """Return in words what differs on unequal shards."""
        if self.uneven.failure:
            return bold(self.uneven.failure)
        words = zip(("value", "encoder", "parameters"), _describe(self.uneven), self.on_even, strict=True)
        changed = [f"{name} {now}" for name, now, even in words if now.partition(" (")[0] != even.partition(" (")[0]]
        return ", ".join(changed) or "nothing"


def _row(recipe: Recipe, worlds: Worlds) -> Row:
    report = examine(
        recipe.case.make,
        world_sizes=(1, 2, 3),
        call=recipe.call,
        grad_reduction=recipe.grad_reduction,
        max_examples=12,
        worlds=worlds,
        name=recipe.name,
    )
    return Row(recipe, measure(recipe.case, EVEN, worlds), measure(recipe.case, UNEVEN, worlds), report)


def measure(case: Case, batch: GlobalBatch, worlds: Worlds) -> Measured:
    trial = Trial(case, batch, worlds)
    world_size = len(batch.shards)
    try:
        expected, by_rank = trial.on_one_process(), trial.on_ranks()
    except RankError as error:
        died = any(isinstance(x, ChildProcessError) for x in error.errors.values())
        return Measured(world_size, failure="process dies" if died else "raises" if error.errors else "hangs")
    return Measured(
        world_size,
        tuple(x.value / expected.value for x in by_rank),
        _compared(trial.reduced("encoder"), expected.encoder),
        _compared(trial.reduced("parameters"), expected.parameters) if expected.parameters else None,
    )


def _compared(gradients: Gradients, expected: Gradients) -> tuple[float, float]:
    names = gradients.keys() & expected.keys()
    x = Ratio.between(flat(gradients, names), flat(expected, names))
    return x.norms, x.cosine


def _describe(found: Measured) -> tuple[str, str, str]:
    if found.failure:
        return (bold(found.failure),) * 3
    parameters = _gradient(found.parameters, found.world_size) if found.parameters else "–"
    return _value(found), _gradient(found.encoder, found.world_size), parameters


def _number(x: float) -> str:
    digits = 0 if x > 10 else 2
    while f"{x:.{digits}f}" == f"{1:.{digits}f}" and not is_near(x, 1.0):
        digits += 1  # a ratio that differs from 1 must not be printed as 1.00
    return f"{x:.{digits}f}"


def _value(found: Measured) -> str:
    low, high = min(found.values), max(found.values)
    if not is_near(low, high):
        return f"{bold('differs per rank')} (×{_number(low)}–{_number(high)})"
    return _factor(low, found.world_size) or f"{bold('wrong')} (×{_number(low)})"


def _gradient(of: tuple[float, float] | None, world_size: int) -> str:
    assert of is not None
    ratio, cosine = of
    if ratio < CLOSE:
        return bold("none")
    if not is_near(cosine, 1.0):
        off = 100 * (ratio**2 + 1 - 2 * ratio * cosine) ** 0.5
        return f"{bold('wrong direction')} (cos {_number(cosine)}, {_number(off)} % off)"
    return _factor(ratio, world_size) or f"{bold('wrong length')} (×{_number(ratio)})"


def _factor(ratio: float, world_size: int) -> str | None:
    named = {"right": 1.0, bold("W×"): float(world_size), bold("1/W"): 1 / world_size}
    return next((name for name, factor in named.items() if is_near(ratio, factor)), None)


def bold(text: str) -> str:
    return f"**{text}**"


def truth_table(rows: Sequence[Row]) -> str:
    by_name = {row.recipe.name: row for row in rows}
    lines = []
    for text, name in TRUTH_TABLE:
        if name in by_name:
            row = by_name[name]
            value, encoder, parameters = row.on_even
            proxies = by_name.get(f"{name}, proxies")
            if parameters == "–" and proxies is not None:  # the same recipe with a loss that has parameters
                parameters = proxies.on_even[2]
            lines.append([text, encoder, parameters, value, row.on_uneven])
    return f"""{table(TRUTHS, lines, texts=len(TRUTHS))}

The hand-written gathers pad uneven shards. With a plain `torch.distributed.all_gather` the process dies there (gloo)."""


def gallery(rows: Sequence[Row]) -> dict[str, str]:
    libraries = ("torch", *sorted({x.library.replace("_", "-") for x in PEERS.values()}))
    return {
        "wrong": _verdicts(row for row in rows if row.recipe.mistake is not None and not row.recipe.library),
        "libraries": f"Measured with {', '.join(f'{x} {version(x)}'.partition('+')[0] for x in libraries)}.\n\n"
        + _verdicts(row for row in rows if row.recipe.library),
    }


def _verdicts(rows: Iterable[Row]) -> str:
    lines = [
        [
            f"*{row.recipe.name}*: {row.recipe.about}",
            row.report.diagnosis.mistake if row.report.diagnosis else "right",
            effect(*row.on_even, row.on_uneven),
        ]
        for row in rows
    ]
    return table(MEASUREMENTS, lines, texts=len(MEASUREMENTS))


def effect(value: str, encoder: str, parameters: str, uneven: str) -> str:
    """Return in words what differs from one process.

    Examples:
        >>> effect("**W×**", "right", "–", "nothing"), effect("right", "right", "right", "**raises**")
        ('value **W×**', 'uneven shards: **raises**')
    """
    if value == encoder == parameters != "right":
        return value
    words = {"value": value, "encoder": encoder, "parameters": parameters}
    differences = [f"{name} {word}" for name, word in words.items() if word not in ("right", "–")]
    if uneven != "nothing":
        differences.append(f"uneven shards: {uneven}")
    return "; ".join(differences) or "another test shows it"


def main() -> None:
    with Worlds(timeout=20.0, grace=0.3) as worlds:
        worlds.start(1, 2, 3, 4)
        rows = [_row(recipe, worlds) for recipe in (*GALLERY.values(), *PEERS.values())]
    fill(PAGES / "gallery.md", gallery(rows))
    fill(ROOT / "README.md", {"truth table": truth_table(rows)})
    print(truth_table(rows))


if __name__ == "__main__":
    main()
