"""Measure the gallery and write its pages: ``python -m tools.gallery_page``.

Writes docs/pages/gallery.md and docs/pages/invariants.md, and the truth table between ``<!-- truth table: begin -->`` and
``<!-- truth table: end -->`` in README.md and docs/pages/index.md.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from contrastive_zoo.testing.gallery.recipe import GALLERY, TRAINING_STEPS, Recipe
from contrastive_zoo.testing.invariants import INVARIANTS
from contrastive_zoo.testing.worlds import Worlds
from tools.gallery_measurement import EVEN, UNEVEN, Row, measure_gallery
from tools.peers import PEERS

TRUTH_TABLE = (
    ("autograd.Function whose backward keeps only this rank's slice (SimCLR re-implementations)", "own slice"),
    ("gather, then overwrite this rank's slice with the live tensor", "overwritten slice"),
    ("the same, loss × W", "own slice × W"),
    ("pytorch-metric-learning's wrapper", "pml wrapper, proxies"),
    ("the same with `efficient=True`", "pml wrapper, efficient"),
    ("local anchors against detached gathered candidates (OpenCLIP `local_loss`)", "detached candidates"),
    ("local anchors, gather with a reduce-scatter backward (lightly, OpenCLIP `gather_with_grad`)", "local loss"),
    ("the same, ranks' means averaged", "mean of means"),
    ("`DistributedLoss(loss)`", "DistributedLoss, any loss"),
)
"""Rows of the truth table, by recipe."""

_BEGIN, _END = "<!-- truth table: begin -->", "<!-- truth table: end -->"


def truth_table(rows: Sequence[Row]) -> str:
    """Return the table of the README: the most common implementations."""
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
    titles = [
        "what people write",
        "encoder gradient",
        "loss's own parameters",
        "value returned",
        "what uneven shards change",
    ]
    return f"""{_table(titles, lines)}

On uneven shards the hand-written recipes pad their shards before they gather. With a plain
`torch.distributed.all_gather` the process dies, as it does in the wrapper (gloo)."""


def with_truth_table(text: str, table: str) -> str:
    """Return ``text`` with the table between its markers replaced; unchanged if it has no markers."""
    return re.sub(f"(?s){_BEGIN}.*?{_END}", lambda _: f"{_BEGIN}\n{table}\n{_END}", text)


def render(rows: Sequence[Row]) -> str:
    """Return the page of the gallery in Markdown."""
    peers = [row for row in rows if row.recipe.name in PEERS]
    hand_written = [row for row in rows if row.recipe.name not in PEERS]
    right = [row for row in hand_written if row.recipe.mistake is None and not row.recipe.step]
    wrong = [row for row in hand_written if row.recipe.mistake is not None and not row.recipe.step]
    steps = [row for row in hand_written if row.recipe.step]
    diagnoses = {row.report.diagnosis.mistake: row.report.diagnosis for row in rows if row.report.diagnosis}
    libraries = sorted({peer.library for peer in PEERS.values()})
    measured = sorted({PEERS[row.recipe.name].library for row in peers})
    absent = [name for name in libraries if name not in measured]
    sizes = " and ".join(str(len(x.shards)) for x in EVEN)
    return f"""\
# The gallery of distributed losses

Which implementations of a distributed contrastive loss are right, and what exactly is wrong with the others?
For people who compare their own code, or a library, with the alternatives.

Every number on this page is measured: each recipe runs on real processes, in float64, with
torch {torch.__version__.partition("+")[0]}, and is compared with one process that holds all samples.

- **On equal shards**: W = {sizes}, {EVEN[0].shards[0]} samples each. A factor holds for every W
  measured; a range is over ranks and over W.
- **Uneven shards**: what changes when two processes hold {UNEVEN.shards[0]} and {UNEVEN.shards[1]} samples. The
  recipes of the first two tables pad before they gather, where they can. With a plain `torch.distributed.all_gather`
  on gloo the process dies, as the last table shows.
- **Gradients** are compared after the trainer has averaged or summed them over ranks. *wrong direction* gives the cosine
  to the true gradient, and the norm of the difference relative to it.
- **Diagnosis** is what [`check_world_size_invariance`](test-your-own.md) reports, from measurements alone. A recipe that
  is right in every column and still has a diagnosis breaks [an invariant](invariants.md) that no column shows: gradient
  accumulation, a queue, an empty shard.
- A dash: the loss has no parameters of its own.

![Held-out loss of several recipes during training, on four processes with uneven shards; only DistributedLoss stays on
the curve of one process](figures/gallery_drift.png)

Two towers on scikit-learn's digits, a learnable scale, SGD. All recipes start from the same parameters and read the same
batches. The figure shows the true loss on held-out images, at the scale that each recipe has learnt. *own slice × W* lies
below the others because its scale learns four times as fast on four processes; the curve depends on the number of processes.

## Right

{_wide(right)}

## Wrong

{_wide(wrong)}

## Training steps

A model, a loss and the gradient all-reduce together, checked with `level="training_step"`. The gradients are those that the
step leaves for the optimizer, on rank 0. The loss's own parameters are told apart from the encoder's also where the loss is
a member of the model.

{_wide(steps)}

## Libraries

Run for this page: {", ".join(f"{_distribution(name)} {_version(name)}" for name in measured) or "none"}.\
{f" Not installed, so not run: {', '.join(map(_distribution, absent))}." if absent else ""}

{_wide(peers)}

## What each diagnosis means, and the fix

{_table(["diagnosis", "what the loss does", "fix"], [[x.mistake, x.why, x.fix] for x in diagnoses.values()])}

This page is written by `python -m tools.gallery_page`.
"""


def render_invariants() -> str:
    """Return the page on the invariants, in Markdown."""
    sections = []
    for invariant in INVARIANTS:
        meaning, _, failing = invariant.meaning.partition(" When it fails, ")
        sections.append(
            f"## `{invariant.name}`\n\n{meaning}\n\n**When it fails,** {failing}\n\n"
            f"**Mistake it catches:** *{invariant.catches}* of [the gallery](gallery.md): "
            f"{_about(GALLERY[invariant.catches])}.\n"
        )
    head = """\
# The invariants

Which properties does `check_world_size_invariance` test, and what goes wrong without each of them?
For people who read a report of the check, or who write a test of their own.

A loss that is the same function on W processes as on one satisfies these invariants on every global batch.
[`check_world_size_invariance`](test-your-own.md) tests all of them. Each is also a function:
`invariant(Trial(case, batch, worlds))` raises `Broken` with the value found and the value expected. Values are compared in
float64, to 1e-10. Each invariant names a mistake of [the gallery](gallery.md) that it catches; a test proves that it does.

The first six are the global-batch contract. The next ones follow from the contract, or are further requirements of a
training loop. The last seven test a training of five steps, with different shard sizes at each step. An invariant that does
not apply to a loss (random draws, for a loss that draws none) is reported as not tried.
"""
    return "\n".join([head, *sections]) + "\nThis page is written by `python -m tools.gallery_page`.\n"


def _wide(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        value, encoder, parameters = row.on_even
        diagnosis = row.report.diagnosis.mistake if row.report.diagnosis else "none needed"
        lines.append(
            [f"*{row.recipe.name}*: {_about(row.recipe)}", value, encoder, parameters, row.on_uneven, diagnosis]
        )
    titles = [
        "what people write",
        "value",
        "encoder gradient",
        "loss's own parameters",
        "uneven shards change",
        "diagnosis",
    ]
    return _table(titles, lines)


def _about(recipe: Recipe) -> str:
    """Return what people write; "the same" is replaced by the recipe that it refers to."""
    about = " ".join(recipe.about.split())
    if not about.startswith("the same"):
        return about
    names = list(TRAINING_STEPS if recipe.step else GALLERY)
    before = reversed(names[: names.index(recipe.name)])
    reference = next(name for name in before if not (GALLERY | TRAINING_STEPS)[name].about.startswith("the same"))
    return f"as *{reference}*{about.removeprefix('the same')}"


def _table(titles: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    cells = [titles, ["---"] * len(titles), *([cell.replace("|", "\\|") for cell in line] for line in lines)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells).replace("| --- |", "|---|").replace(" --- |", "---|")


def _distribution(library: str) -> str:
    return library.replace("_", "-")


def _version(library: str) -> str:
    try:
        return version(_distribution(library))
    except PackageNotFoundError:
        return ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the gallery and write the pages."""
    parser = argparse.ArgumentParser(prog="python -m tools.gallery_page", description=__doc__)
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder of the documentation")
    parser.add_argument("--readme", type=Path, default=Path("README.md"))
    given = parser.parse_args(arguments)
    pages = given.docs / "pages"
    pages.mkdir(parents=True, exist_ok=True)
    with Worlds(timeout=6.0, grace=0.3) as worlds:
        worlds.start(1, 2, 3, 4)
        rows = measure_gallery(worlds)
    (pages / "gallery.md").write_text(render(rows), encoding="utf-8")
    (pages / "invariants.md").write_text(render_invariants(), encoding="utf-8")
    table = truth_table(rows)
    for page in (given.readme, pages / "index.md"):
        if page.exists():
            page.write_text(with_truth_table(page.read_text(encoding="utf-8"), table), encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
